"""Progress metrics for display, computed from `StepMetrics` rows: the last update's values, and speed over a window."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from rich.filesize import decimal

from surefoot.records import NAN, StepMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressMetrics:
    """The values of one progress line; NaN means unknown."""

    step: int
    """Applied updates, this one included."""
    attempt: int = -1
    loss: float = NAN
    lr: float = NAN
    grad_norm: float = NAN
    grads_measured: bool = True
    """Whether gradients were measured at all: only then does a NaN norm mean something."""
    tokens_per_s: float = NAN
    samples_per_s: float = NAN
    data_wait: float = NAN
    """Fraction of the time spent waiting for data, 0 to 1."""
    memory: float = NAN
    """Bytes."""
    memory_peak: float = NAN
    seconds_left: float = NAN


class ProgressTracker:
    """Collects rows; speeds are averaged over the last `window` rows."""

    def __init__(self, window: int) -> None:
        self._rows: deque[StepMetrics] = deque(maxlen=window)
        self._memory = self._memory_peak = NAN
        self._last_attempt = -1

    def rewound(self, attempt: int) -> None:
        """The run was rewound after this attempt: ignore rows up to it."""
        self._last_attempt = max(self._last_attempt, attempt)

    def add(self, row: StepMetrics) -> bool:
        """False for a row that was added before, or that a rewind has undone."""
        if row.attempt <= self._last_attempt:
            return False
        self._rows.append(row)
        self._last_attempt = row.attempt
        if not math.isnan(row.memory):  # memory is not read at every step
            self._memory, self._memory_peak = row.memory, row.memory_peak
        return True

    def current(self) -> ProgressMetrics:
        row = self._rows[-1]
        return ProgressMetrics(
            step=row.step + row.applied,
            attempt=row.attempt,
            loss=row.loss,
            lr=row.lr,
            grad_norm=row.norm,
            grads_measured=not math.isnan(row.norm) or not math.isnan(row.nonfinite),
            tokens_per_s=self._per_second("tokens"),
            samples_per_s=self._per_second("samples"),
            data_wait=self._per_second("data_wait"),
            memory=self._memory,
            memory_peak=self._memory_peak,
            seconds_left=row.seconds_left,
        )

    def _per_second(self, column: str) -> float:
        pairs = [(getattr(row, column), row.seconds) for row in self._rows]
        known = [(value, seconds) for value, seconds in pairs if not math.isnan(value + seconds)]
        total_seconds = sum(seconds for _, seconds in known)
        return sum(value for value, _ in known) / total_seconds if total_seconds > 0 else NAN


def format_metrics(metrics: ProgressMetrics, total: int) -> dict[str, str]:
    """The known metrics as text, by name."""
    parts = {"step": f"step {metrics.step}/{total}"}
    columns = (
        ("loss", metrics.loss, lambda x: f"loss {x:.4f}"),
        ("lr", metrics.lr, lambda x: f"lr {x:.3g}"),
        ("grad_norm", metrics.grad_norm, lambda x: f"grad_norm {x:.3g}"),
        ("speed", metrics.tokens_per_s, lambda x: f"{x:.0f} tokens/s"),
        ("speed", metrics.samples_per_s, lambda x: f"{x:.0f} samples/s"),
        ("data_wait", metrics.data_wait, lambda x: f"data wait {x:.0%}"),
        ("memory", metrics.memory, lambda x: f"memory {decimal(int(x))}"),
        ("left", metrics.seconds_left, lambda x: f"{format_duration(x)} left"),
    )
    for name, value, text in columns:
        always = name == "loss" or (name == "grad_norm" and metrics.grads_measured)
        if always or (math.isfinite(value) and name not in parts):
            parts[name] = text(value)
    return parts


def format_duration(seconds: float) -> str:
    """A duration for people: 45 s, 12 min, 3 h 20 min, 2 d 4 h."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 60:
        return f"{minutes} min"
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


_DROP_ORDER = "memory", "data_wait", "speed", "grad_norm", "lr"


def fit_to_width(parts: dict[str, str], width: int, note: str = "") -> str:
    """One line of at most `width` characters; the least important metrics are dropped first."""
    kept = parts | ({"note": note} if note else {})
    for name in _DROP_ORDER:
        if len("  ".join(kept.values())) < width:
            break
        kept.pop(name, None)
    return "  ".join(kept.values())
