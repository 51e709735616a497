"""Dates a rise to the row at which it began."""

from __future__ import annotations

import numpy as np

from surefoot.signals.baseline import Floats
from surefoot.signals.change import Change

STEP_ROWS = 12
"""Values on either side of a step that show its height."""
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
    before, after = around[max(0, at - STEP_ROWS) : at], around[at : at + STEP_ROWS]
    if min(len(before), len(after)) < STEP_ROWS // 2 or high <= low:
        return None
    height = float(np.median(after) - np.median(before))
    return first + at if height > STEP_SHARE * max(change.size, high - low) else None
