"""Layout of numbers in plots: thinning, scales, ticks; shared by all renderers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MAX_DRAWN = 1e200
"""Larger numbers are drawn and compared as this, so that their differences stay finite."""
LOG_SCALE_DECADES = 1.5
"""Powers of ten that values have to span before the scale is logarithmic."""


@dataclass(frozen=True, slots=True)
class AxisScale:
    """Maps values to the height of a plot, from the bottom (0) to the top (1)."""

    low: float
    high: float
    kind: str = "linear"
    """linear, log, or both: logarithmic on either side of zero, for losses that are negative and huge."""

    def position(self, values: Floats) -> Floats:
        """Heights of values; non-finite ones stay NaN."""
        bottom, top = (float(self._transform(np.asarray(edge))) for edge in (self.low, self.high))
        with np.errstate(invalid="ignore"):
            where = (self._transform(clip_finite(values)) - bottom) / ((top - bottom) or 1.0)
        return np.clip(where, 0.0, 1.0)

    def ticks(self, most: int = 4) -> list[float]:
        """Round values to label, lowest first."""
        if self.kind == "log":
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            interval = max(1, math.ceil((last - first + 1) / most))
            powers = [10.0**power for power in range(first, last + 1, interval)]
            return powers if len(powers) > 1 else [self.low, self.high]
        if self.kind == "both":
            return [self.low, *([0.0] if self.low < 0 < self.high else []), self.high]
        return _round_ticks(self.low, self.high, most)

    def _transform(self, values: Floats) -> Floats:
        if self.kind == "log":
            with np.errstate(divide="ignore", invalid="ignore"):
                return np.log10(np.maximum(values, self.low))
        return np.arcsinh(values) if self.kind == "both" else values


def choose_scale(parts: Iterable[Floats], *, linear: bool = False) -> AxisScale:
    """Linear, or logarithmic if the values span decades: a blow-up must not flatten all that came before it.

    `linear` forces a linear scale.
    """
    values = clip_finite(np.concatenate([np.empty(0), *(part[np.isfinite(part)] for part in parts)]))
    if not len(values):
        return AxisScale(0.0, 1.0)
    low, high = float(values.min()), float(values.max())
    above = values[values > 0]
    if not linear and low >= 0 and len(above) and _span_decades(above) > LOG_SCALE_DECADES:
        # A single tiny value must not stretch the scale down to it.
        floor = max(float(above.min()), float(np.quantile(above, 0.01)) / 30)
        return AxisScale(floor, max(high, floor * 10), "log")
    typical = float(np.median(np.abs(values))) or 1.0
    if not linear and low < 0 and max(-low, high) > 1000 * typical:
        return AxisScale(low, high, "both")
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        room = abs(high) * 0.1 or 1.0
        return AxisScale(low - room, high + room)
    return AxisScale(low, high)


def clip_finite(values: Floats) -> Floats:
    """Clip values to +-1e200; non-finite ones become NaN."""
    return np.clip(np.where(np.isfinite(values), values, np.nan), -MAX_DRAWN, MAX_DRAWN)


def _span_decades(above: Floats) -> float:
    return math.log10(float(above.max())) - math.log10(float(np.quantile(above, 0.01)))


def _round_ticks(low: float, high: float, most: int) -> list[float]:
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    rough = span / max(most, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    interval = next((power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999), power * 10)
    if not interval > 0:
        return [low, high]
    ticks = np.arange(math.ceil(low / interval - 1e-9), math.floor(high / interval + 1e-9) + 1) * interval
    return [float(tick) for tick in ticks[: most + 2]] or [low, high]


def thin_points(steps: Floats, values: Floats, most: int) -> tuple[Floats, Floats]:
    """At most `most` points in the log's order, those that shape the line."""
    if len(values) <= most:
        return steps, values
    kept = shape_indices(values, most)
    return steps[kept], values[kept]


def shape_indices(values: Floats, most: int) -> NDArray[np.int64]:
    """Indices of the lowest and the highest value of each bucket; a NaN counts as the highest."""
    size = math.ceil(len(values) / max(1, most // 2))
    whole = math.ceil(len(values) / size) * size
    padded = np.concatenate([values, np.full(whole - len(values), values[-1])]).reshape(-1, size)
    low = np.where(np.isnan(padded), np.inf, padded).argmin(1)
    high = np.where(np.isnan(padded), np.inf, padded).argmax(1)
    index = np.sort(np.stack([low, high], 1), axis=1) + np.arange(0, whole, size)[:, None]
    ends = (0, len(values) - 1)
    return np.unique(np.minimum(np.concatenate([index.ravel(), ends]), ends[1])).astype(np.int64)


def nonfinite_spans(steps: Floats, values: Floats) -> list[tuple[float, float]]:
    """First and last step of each stretch of non-finite values."""
    bad = ~np.isfinite(values)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], bad, [False]]).astype(np.int8)))
    return [(float(steps[a]), float(steps[b - 1])) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def step_range(parts: Sequence[Floats]) -> tuple[float, float]:
    """First and last step of all parts."""
    steps = clip_finite(np.concatenate([np.empty(0), *(part[np.isfinite(part)] for part in parts)]))
    return (float(steps.min()), float(steps.max())) if len(steps) else (0.0, 1.0)
