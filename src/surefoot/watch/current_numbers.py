"""The newest values of a run, its speed and memory, and what the machine waits for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from surefoot.journal.pyramid_reader import MappedRows
from surefoot.journal.strict_json import plain
from surefoot.records import NAN, REFUSED

_SPEED_ROWS = 100
_DATA_BOUND = 0.3
"""Fraction of the time spent waiting for data from which that is named."""
_IDLE = 0.6
"""Utilisation under which the device counts as idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurrentNumbers:
    """The numbers in the header of the terminal and of the page; NaN where unknown."""

    step: int = -1
    attempt: int = -1
    time: float = 0.0
    total_steps: float = NAN
    loss: float = NAN
    eval_loss: float = NAN
    norm: float = NAN
    lr: float = NAN
    loss_scale: float = NAN
    update_ratio: float = NAN
    steps_per_s: float = NAN
    samples_per_s: float = NAN
    tokens_per_s: float = NAN
    data_wait: float = NAN
    """Fraction of the time."""
    memory: float = NAN
    memory_peak: float = NAN
    memory_reserved: float = NAN
    utilisation: float = NAN
    seconds_left: float = NAN
    refused: int = 0
    """Updates refused among the last ones."""
    on_accelerator: bool = False
    """Whether `utilisation` is that of an accelerator."""

    @property
    def bottleneck(self) -> str:
        """What the machine waits for, with what to do; empty if nothing stands out."""
        if self.data_wait > _DATA_BOUND:
            return (
                f"data: {self.data_wait:.0%} of the time is spent waiting for batches; "
                f"use more workers, pinned memory and prefetching"
            )
        if self.on_accelerator and self.utilisation < _IDLE:
            return (
                f"launches: the device is busy {self.utilisation:.0%} of the time, and data is not the reason; "
                f"use larger batches, torch.compile or fewer host reads"
            )
        return ""

    def as_json(self) -> dict[str, object]:
        values = plain(asdict(self) | {"bottleneck": self.bottleneck})
        return {key: None if value in ("nan", "inf", "-inf") else value for key, value in values.items()}


def current_numbers(
    segments: Sequence[MappedRows], total_steps: float, *, on_accelerator: bool = False
) -> CurrentNumbers:
    """From the last rows of a run."""
    if not segments:
        return CurrentNumbers(total_steps=total_steps)
    rows = segments[-1].rows[-_SPEED_ROWS:]
    names = rows.dtype.names or ()
    last = rows[-1]

    def newest(name: str) -> float:
        return _newest(rows[name]) if name in names else NAN

    def at_last(name: str) -> float:
        return float(last[name]) if name in names else NAN

    return CurrentNumbers(
        step=int(last["step"]) + (at_last("verdict") == 0),
        attempt=int(last["attempt"]),
        time=at_last("time"),
        total_steps=total_steps,
        loss=at_last("loss"),
        eval_loss=newest("eval_loss"),
        norm=at_last("norm"),
        lr=newest("lr"),
        loss_scale=newest("loss_scale"),
        update_ratio=newest("update_ratio"),
        steps_per_s=_per_second(rows, None),
        samples_per_s=_per_second(rows, "samples"),
        tokens_per_s=_per_second(rows, "tokens"),
        data_wait=_per_second(rows, "data_wait"),
        memory=newest("memory"),
        memory_peak=newest("memory_peak"),
        memory_reserved=newest("memory_reserved"),
        utilisation=newest("utilisation"),
        seconds_left=newest("seconds_left"),
        on_accelerator=on_accelerator,
        refused=int(np.isin(rows["verdict"], REFUSED).sum()) if "verdict" in names else 0,
    )


def _newest(values: np.ndarray) -> float:
    """The last finite value; not every column is measured at every step."""
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if len(finite) else NAN


def _per_second(rows: np.ndarray, column: str | None) -> float:
    names = rows.dtype.names or ()
    if "seconds" not in names or (column is not None and column not in names):
        return NAN
    seconds = rows["seconds"].astype(np.float64)
    values = np.ones(len(rows)) if column is None else rows[column].astype(np.float64)
    known = np.isfinite(seconds) & np.isfinite(values)
    total = float(seconds[known].sum())
    return float(values[known].sum()) / total if total > 0 and not math.isnan(total) else NAN
