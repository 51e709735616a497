"""The level, noise and peaks of a noisy curve, on a logarithmic scale."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

import numpy as np

from surefoot.logs.run_curves import Floats, Series

MAX_POINTS = 4000
"""Longer curves are reduced to buckets with their median and their peak."""
MAX_WINDOW = 101
"""Largest window of the running median."""
MIN_NOISE = 0.02
"""Least noise assumed, relative to the value: without any, every change would be a symptom."""


@dataclass(frozen=True, slots=True)
class LossCurve:
    """The finite part of a series, as logarithms (of the distance from its minimum, if it has negative values)."""

    steps: Floats
    raw: Floats
    """The values as logged (the median of each bucket)."""
    values: Floats
    peaks: Floats
    """The maximum of each bucket; the values themselves without buckets."""
    level: Floats
    """Running median."""
    noise: float
    """Typical distance of a value from the level."""
    start: float
    best: float
    """The lowest level."""
    best_at: int
    last: float
    level_error: float
    """Standard error of the median of the last values."""

    def __len__(self) -> int:
        return len(self.values)

    @property
    def rise(self) -> float:
        """From the lowest level to the last one."""
        return self.last - self.best

    @property
    def fall(self) -> float:
        """From the first level to the last one."""
        return self.start - self.last


def loss_curve(series: Series) -> LossCurve | None:
    """The curve of the finite values of a series; None if there are none."""
    finite = np.isfinite(series.values)
    steps, raw = series.steps[finite], series.values[finite]
    if not len(raw):
        return None
    values = logarithms(raw)
    peaks = values
    if len(raw) > MAX_POINTS:
        size = -(-len(raw) // MAX_POINTS)
        steps = _buckets(steps, size)[:, 0]
        raw = np.median(_buckets(raw, size), axis=1)
        peaks = _buckets(values, size).max(axis=1)
        values = np.median(_buckets(values, size), axis=1)
    return _build_curve(steps, raw, values, peaks)


def _build_curve(steps: Floats, raw: Floats, values: Floats, peaks: Floats) -> LossCurve:
    count = len(values)
    window = max(3, min(count // 20 * 2 + 1, MAX_WINDOW))
    level = running_median(values, window)
    apart = np.abs(values - level)
    typical = max(float(np.median(apart)) * 1.4826, float(np.mean(apart)) if count < 40 else 0.0)
    noise = max(typical, MIN_NOISE)
    few = max(1, min(5, count // 20))
    tail = max(3, min(count // 10, window))
    best_at = _lowest_level(level, window // 2)
    return LossCurve(
        steps=steps,
        raw=raw,
        values=values,
        peaks=peaks,
        level=level,
        noise=noise,
        start=float(np.median(values[:few])),
        best=float(level[best_at]),
        best_at=best_at,
        last=float(np.median(values[-tail:])),
        level_error=1.25 * noise / float(np.sqrt(min(tail, count))),
    )


def _lowest_level(level: Floats, half: int) -> int:
    """The index of the lowest level, without the ends, where it is the median of few values."""
    edge = half if len(level) > 4 * half else 0
    return int(np.argmin(level[edge : len(level) - edge])) + edge


def logarithms(raw: Floats) -> Floats:
    """On a scale on which noise is about equal everywhere; with negative values, of the distance from the lowest."""
    if (raw < 0).any():
        quarter = raw / 4  # differences of the largest floats would overflow
        low, high = np.quantile(quarter, [0.05, 0.95])
        room = 0.1 * (high - low) or 0.25
        return np.log(quarter - quarter.min() + room) + np.log(4)
    above = raw[raw > 0]
    floor = max(above.min() / 2, np.finfo(np.float64).smallest_subnormal) if len(above) else 1e-30
    return np.log(np.maximum(raw, floor))


def _buckets(values: Floats, size: int) -> Floats:
    short = -len(values) % size
    padded = np.concatenate([values, np.full(short, values[-1])]) if short else values
    return padded.reshape(-1, size)


def running_median(values: Floats, window: int) -> Floats:
    """The running median; the window shrinks at the ends."""
    half = min(window // 2, len(values) - 1)
    if half < 1:
        return values.copy()
    width = 2 * half + 1
    if len(values) < width:
        ends = range(len(values))
        return np.array([np.median(values[max(0, at - half) : at + half + 1]) for at in ends])
    center = np.median(np.lib.stride_tricks.sliding_window_view(values, width), axis=1)
    return np.concatenate([_edge_medians(values, half), center, _edge_medians(values[::-1], half)[::-1]])


def _edge_medians(values: Floats, half: int) -> list[float]:
    """The medians of the first `half` + 1 values, of one more, and so on, `half` of them."""
    ordered = sorted(values[:half].tolist())
    medians: list[float] = []
    for value in values[half : 2 * half].tolist():
        insort(ordered, value)
        count = len(ordered)
        medians.append((ordered[(count - 1) // 2] + ordered[count // 2]) / 2)
    return medians
