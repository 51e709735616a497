"""Dates a rise to the row at which it began."""

from __future__ import annotations

import numpy as np

from surefoot.signals.baseline import MEDIAN_ERROR, Floats
from surefoot.signals.change import Change

STEP_ROWS, NOISY_STEP_ROWS = 12, 100
"""Values on either side of a step that show its height: so many, more where it is not above the noise."""
STEP_ERRORS = 4.0
"""Standard errors by which it is above chance."""
STEP_SHARE = 0.6
"""A slow change of which this share came from one value to the next was a step."""


def locate_rise(values: Floats, before: float, noise: float) -> int:
    """The index of the value at which a level rises, given the level before it."""
    height = max(float(np.median(values[-max(3, len(values) // 2) :])) - before, noise)
    gains = np.clip(values - before, -height, 2 * height) - height / 2
    ahead = np.cumsum(gains[::-1])[::-1]
    return int(np.argmax(ahead))


def find_step(values: Floats, change: Change) -> int | None:
    """The index at which a change that was seen late rose at once, if it did; `values` are all that were fed."""
    lag = change.found - change.onset
    first, last = max(0, change.onset - lag), min(len(values), change.found + lag)
    around = values[first:last]
    if len(around) < 2 * STEP_ROWS:
        return None
    low, high = float(np.median(around[: len(around) // 4])), float(np.median(around[-(len(around) // 4) :]))
    gains = np.clip(around - (low + high) / 2, low - high, high - low)
    at = int(np.argmin(np.cumsum(gains))) + 1
    size = max(change.size, high - low)
    rows = int(min(max(STEP_ROWS, NOISY_STEP_ROWS * (change.noise / size) ** 2), len(around) // 4)) if size > 0 else 0
    before, after = around[max(0, at - rows) : at], around[at : at + rows]
    if min(len(before), len(after)) < max(rows // 2, 3):
        return None
    height = float(np.median(after) - np.median(before))
    least = max(STEP_SHARE * size, STEP_ERRORS * MEDIAN_ERROR * change.noise * float(np.sqrt(2 / rows)))
    return first + at if height > least else None
