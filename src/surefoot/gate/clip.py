"""Parses `clip=` into units: spans of tensors that are clipped together."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from surefoot.measure.layout import ParamLayout

ADAPTIVE_START = 10.0
"""Adaptive threshold until `ADAPTIVE_MIN_NORMS` norms are known."""
ADAPTIVE_MIN_NORMS = 100
"""Accepted norms before the percentile is used."""
NORM_HISTORY = 1000
"""Accepted norms the percentile is taken over."""
ADAPTIVE_PERCENTILE = 0.995
ADAPTIVE_MIN, ADAPTIVE_MAX = 1.0, 100.0
"""Range of the adaptive threshold."""

ClipOption = None | float | str | Mapping[str, float] | Sequence["float | str | Mapping[str, float] | None"]


@dataclass(frozen=True, slots=True)
class Clip:
    """One threshold: a fixed norm, a fixed value, or an adaptive norm."""

    norm: float = math.inf
    value: float = math.inf
    adaptive: bool = False

    @property
    def by_norm(self) -> bool:
        return self.adaptive or self.norm < math.inf

    @property
    def enabled(self) -> bool:
        return self.by_norm or self.value < math.inf


@dataclass(frozen=True, slots=True)
class ClipUnit:
    """A span of tensors of one optimizer that is clipped together."""

    optimizer: int
    span: slice
    clip: Clip


def clip_units(option: ClipOption, layout: ParamLayout) -> tuple[ClipUnit, ...]:
    """One unit an optimizer, or one a parameter group when `clip=` is a list."""
    if isinstance(option, Sequence) and not isinstance(option, str):
        spans = [(k, span) for k, groups in enumerate(layout.group_spans) for span in groups]
        if len(option) != len(spans):
            raise ValueError(
                f"attach: clip= has {len(option)} entries for {len(spans)} parameter groups. Give one entry per "
                "group, in order (None for no clipping), or one number for all."
            )
        return tuple(ClipUnit(k, span, _clip(entry)) for (k, span), entry in zip(spans, option, strict=True))
    clip = _clip(option)
    return tuple(ClipUnit(k, span, clip) for k, span in enumerate(layout.optimizer_spans))


def _clip(option: object) -> Clip:
    if option is None:
        return Clip()
    if option == "adaptive":
        return Clip(adaptive=True)
    if _is_threshold(option):
        return Clip(norm=float(option))  # pyright: ignore[reportArgumentType]
    if isinstance(option, Mapping) and option and set(option) <= {"norm", "value"}:
        thresholds = {"norm": math.inf, "value": math.inf, **option}
        if all(_is_threshold(v) for v in thresholds.values()):
            return Clip(norm=float(thresholds["norm"]), value=float(thresholds["value"]))
    raise ValueError(
        f"attach: clip={option!r} is not understood. Use None (no clipping), a positive number (global norm), "
        "'adaptive', {'value': 0.5} (by value), or a list with one of these for each parameter group."
    )


def _is_threshold(option: object) -> bool:
    return isinstance(option, int | float) and not isinstance(option, bool) and option > 0
