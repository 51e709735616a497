"""What `clip=` may say, and the spans of tensors that share one threshold."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from surefoot.measure.layout import Layout

FIRST = 10.0
"""Adaptive threshold until enough norms are known."""
KNOWN = 100
"""Norms that must be known before the percentile is used."""
MEMORY = 1000
"""Accepted norms the percentile looks back on."""
PERCENTILE = 0.995
LEAST, MOST = 1.0, 100.0

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
    def anything(self) -> bool:
        return self.by_norm or self.value < math.inf


@dataclass(frozen=True, slots=True)
class Unit:
    """A span of tensors of one optimizer that is clipped together."""

    optimizer: int
    span: slice
    clip: Clip


def units_of(option: ClipOption, layout: Layout) -> tuple[Unit, ...]:
    """One unit an optimizer, or one a parameter group when `clip=` names them one by one."""
    if isinstance(option, Sequence) and not isinstance(option, str):
        spans = [(k, span) for k, groups in enumerate(layout.groups) for span in groups]
        if len(option) != len(spans):
            raise ValueError(
                f"attach: clip= has {len(option)} entries for {len(spans)} parameter groups. Give one entry a group, "
                "in order (None leaves a group alone), or one number for all."
            )
        return tuple(Unit(k, span, _clip(each)) for (k, span), each in zip(spans, option, strict=True))
    clip = _clip(option)
    return tuple(Unit(k, span, clip) for k, span in enumerate(layout.scopes))


def _clip(option: object) -> Clip:
    if option is None:
        return Clip()
    if option == "adaptive":
        return Clip(adaptive=True)
    if _is_threshold(option):
        return Clip(norm=float(option))  # pyright: ignore[reportArgumentType]
    if isinstance(option, Mapping) and option and set(option) <= {"norm", "value"}:
        wanted = {"norm": math.inf, "value": math.inf, **option}
        if all(_is_threshold(v) for v in wanted.values()):
            return Clip(norm=float(wanted["norm"]), value=float(wanted["value"]))
    raise ValueError(
        f"attach: clip={option!r} is not understood. Use None (no clipping), a positive number (global norm), "
        "'adaptive', {'value': 0.5} (by value), or a list with one of these for each parameter group."
    )


def _is_threshold(option: object) -> bool:
    return isinstance(option, int | float) and not isinstance(option, bool) and option > 0
