"""A level that rises too slowly to be seen from row to row, found in the history of levels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from surefoot.signals.baseline import MAD_TO_SIGMA, Floats, LevelHistory

MIN_BLOCKS = 12
"""Fewer blocks of history show no drift."""
SMOOTH = 3
"""Neighbouring blocks that are averaged before levels are compared."""


@dataclass(frozen=True, slots=True)
class SlowRise:
    """The present level of a history above its best one."""

    block: int
    """The last block at the best level."""
    best: float
    size: float
    margin: float
    """A rise by chance is smaller."""
    from_start: bool
    """The first level was as low as the best one."""


def slow_rise(history: LevelHistory, deviations: float) -> SlowRise | None:
    """How far the last blocks of a history are above its best ones, and how far they could be by chance.

    The noise of the blocks is taken from the blocks themselves; if neighbours differ less than blocks further apart,
    the level wanders, and the margin grows with the distance as a random walk does.
    """
    levels = np.asarray(history.levels)
    if len(levels) < MIN_BLOCKS:
        return None
    smooth = np.convolve(levels, np.full(SMOOTH, 1 / SMOOTH), "valid")
    at = int(np.argmin(smooth[:-2])) if len(smooth) > 4 else 0
    size = float(smooth[-1] - smooth[at])
    if size <= 0:
        return None
    distance = len(smooth) - 1 - at
    near, far = _bend(levels, 1), _bend(levels, 4)
    wandering = min(max(float(np.log2(far / near)) / 2, 0.0), 0.5) if near > 0 and far > 0 else 0.0
    margin = deviations * near * float(np.sqrt(2 / SMOOTH)) * (distance / SMOOTH) ** wandering
    below = np.flatnonzero(smooth <= smooth[at] + margin / 2)
    from_start = bool(smooth[0] - smooth[at] <= margin)
    return SlowRise(int(below[-1]) + 1, float(smooth[at]), size, margin, from_start)


def _bend(levels: Floats, apart: int) -> float:
    """Noise of a level, from second differences, which a steady rise or fall leaves out."""
    if len(levels) < 2 * apart + 4:
        return 0.0
    bends = levels[2 * apart :] - 2 * levels[apart:-apart] + levels[: -2 * apart]
    return MAD_TO_SIGMA * float(np.median(np.abs(bends))) / float(np.sqrt(6))
