"""Where a noisy curve stands: its levels, its noise and its peaks, on a logarithmic scale."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

import numpy as np

from surefoot.logs.run_curves import Floats, Series

MAX_POINTS = 4000
"""Points that are looked at; of a longer curve stretches are put together, with their median and their peak."""
MAX_WINDOW = 101
"""Points over which a level is taken at most."""
MIN_NOISE = 0.02
"""Noise that is assumed at least, as a share of the value: a curve without any would make everything a sign."""


@dataclass(frozen=True, slots=True)
class LossCurve:
    """The finite part of a trace, as logarithms (of the distance from its lowest value, if it is ever below zero)."""

    steps: Floats
    raw: Floats
    """The values as they were logged (the median of a stretch where they were put together)."""
    values: Floats
    peaks: Floats
    """The highest of each stretch; the values themselves where nothing was put together."""
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
    """How far the median over the last values may be off by chance."""

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


def loss_curve(trace: Series) -> LossCurve | None:
    """The curve of what is finite in a trace; None if that is nothing."""
    finite = np.isfinite(trace.values)
    steps, raw = trace.steps[finite], trace.values[finite]
    if not len(raw):
        return None
    values = _logarithms(raw)
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
    """Where the level is lowest, but for the ends, where it is the median of few values."""
    edge = half if len(level) > 4 * half else 0
    return int(np.argmin(level[edge : len(level) - edge])) + edge


def _logarithms(raw: Floats) -> Floats:
    if (raw < 0).any():
        quarter = raw / 4  # differences of the largest numbers there are would overflow
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
    """The median of the values around each one; at the ends of those there are."""
    half = min(window // 2, len(values) - 1)
    if half < 1:
        return values.copy()
    width = 2 * half + 1
    if len(values) < width:
        ends = range(len(values))
        return np.array([np.median(values[max(0, at - half) : at + half + 1]) for at in ends])
    middle = np.median(np.lib.stride_tricks.sliding_window_view(values, width), axis=1)
    return np.concatenate([_edge_medians(values, half), middle, _edge_medians(values[::-1], half)[::-1]])


def _edge_medians(values: Floats, half: int) -> list[float]:
    """The medians of the first `half` + 1 values, of one more, and so on, `half` of them."""
    ordered = sorted(values[:half].tolist())
    found: list[float] = []
    for value in values[half : 2 * half].tolist():
        insort(ordered, value)
        count = len(ordered)
        found.append((ordered[(count - 1) // 2] + ordered[count // 2]) / 2)
    return found
