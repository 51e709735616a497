"""The rows of a run as the figures that are shown: of the last update, and of the speed over the last few."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from rich.filesize import decimal

from surefoot.records import NAN, StepMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a line shows; NaN where it is not known."""

    step: int
    """Updates that have landed, with this one."""
    attempt: int = -1
    loss: float = NAN
    rate: float = NAN
    norm: float = NAN
    measured: bool = True
    """Whether anybody looked at the gradients; a norm that is NaN then says something."""
    tokens_per_s: float = NAN
    samples_per_s: float = NAN
    data_wait: float = NAN
    """Share of the time in which the training waits for data, 0 to 1."""
    memory: float = NAN
    """Bytes."""
    memory_peak: float = NAN
    time_left: float = NAN
    """Seconds."""


class Figuring:
    """Takes rows one after the other; speed is that of the last `window` of them."""

    def __init__(self, window: int) -> None:
        self._rows: deque[StepMetrics] = deque(maxlen=window)
        self._memory = self._peak = NAN
        self._upto = -1

    def went_back(self, attempt: int) -> None:
        """After this attempt the run went back: rows of updates up to it are of no interest any more."""
        self._upto = max(self._upto, attempt)

    def take(self, row: StepMetrics) -> bool:
        """False for a row that was taken before, or is of a time that is gone."""
        if row.attempt <= self._upto:
            return False
        self._rows.append(row)
        self._upto = row.attempt
        if not math.isnan(row.memory):  # it is not read at every step
            self._memory, self._peak = row.memory, row.memory_peak
        return True

    def now(self) -> Figures:
        row = self._rows[-1]
        return Figures(
            step=row.step + row.applied,
            attempt=row.attempt,
            loss=row.loss,
            rate=row.lr,
            norm=row.norm,
            measured=not math.isnan(row.norm) or not math.isnan(row.nonfinite),
            tokens_per_s=self._over_time("tokens"),
            samples_per_s=self._over_time("samples"),
            data_wait=self._over_time("data_wait"),
            memory=self._memory,
            memory_peak=self._peak,
            time_left=row.seconds_left,
        )

    def _over_time(self, name: str) -> float:
        pairs = [(getattr(row, name), row.seconds) for row in self._rows]
        known = [(value, seconds) for value, seconds in pairs if not math.isnan(value + seconds)]
        seconds = sum(seconds for _, seconds in known)
        return sum(value for value, _ in known) / seconds if seconds > 0 else NAN


def in_words(figures: Figures, total: int) -> dict[str, str]:
    """Each figure that is known as it is shown, by its name."""
    told = {"step": f"step {figures.step}/{total}"}
    shown = (
        ("loss", figures.loss, lambda x: f"loss {x:.4f}"),
        ("rate", figures.rate, lambda x: f"rate {x:.3g}"),
        ("norm", figures.norm, lambda x: f"norm {x:.3g}"),
        ("speed", figures.tokens_per_s, lambda x: f"{x:.0f} tokens/s"),
        ("speed", figures.samples_per_s, lambda x: f"{x:.0f} samples/s"),
        ("wait", figures.data_wait, lambda x: f"data wait {x:.0%}"),
        ("memory", figures.memory, lambda x: f"memory {decimal(int(x))}"),
        ("left", figures.time_left, lambda x: f"{span(x)} left"),
    )
    for name, value, words in shown:
        if name == "loss" or (name == "norm" and figures.measured) or (math.isfinite(value) and name not in told):
            told[name] = words(value)
    return told


def span(seconds: float) -> str:
    """A time as people say it: 45 s, 12 min, 3 h 20 min, 2 d 4 h."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


_GIVEN_UP = "memory", "wait", "speed", "norm", "rate"


def fitting(parts: dict[str, str], width: int, note: str = "") -> str:
    """As much of a line as fits on a terminal; what matters least goes first."""
    kept = parts | ({"note": note} if note else {})
    for name in _GIVEN_UP:
        if len("  ".join(kept.values())) < width:
            break
        kept.pop(name, None)
    return "  ".join(kept.values())
