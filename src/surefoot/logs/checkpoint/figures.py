"""What one look at a tensor tells: counts, extremes, the norm, rows of nothing but zeros."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from surefoot.logs.checkpoint.held import Held, Numbers

_PART = 1 << 22
"""Numbers held at a time."""


@dataclass(slots=True)
class Figures:
    """Of one tensor; extremes and norm are those of its finite values."""

    count: int = 0
    nans: int = 0
    plus: int = 0
    minus: int = 0
    """Values of plus and of minus infinity."""
    low: float = math.inf
    high: float = -math.inf
    square: float = 0.0
    zeros: int = 0
    rows: int = 0
    empty_rows: int = 0
    """Rows of nothing but zeros."""
    broken_rows: int = 0
    """Rows with a NaN or an infinity in them."""

    @property
    def bad(self) -> int:
        return self.nans + self.plus + self.minus

    @property
    def norm(self) -> float:
        return math.sqrt(self.square)

    @property
    def rms(self) -> float:
        return math.sqrt(self.square / max(1, self.count - self.bad))

    @property
    def largest(self) -> float:
        return max(abs(self.low), abs(self.high)) if self.low <= self.high else 0.0

    @property
    def constant(self) -> bool:
        return self.low == self.high and not self.bad

    @property
    def masks(self) -> bool:
        """Whether it is what a mask is: minus infinity in places, one and the same value in all others."""
        return self.minus > 0 and not self.nans and not self.plus and self.low >= self.high


def figures(held: Held) -> Figures:
    """One pass over the numbers, in parts of whole rows where a row is not too long."""
    found = Figures()
    width = math.prod(held.shape[1:]) if len(held.shape) > 1 else 0
    size = max(1, _PART // width) * width if 0 < width <= _PART else _PART
    by_rows = 1 < width <= _PART
    with np.errstate(all="ignore"):
        for part in held.parts(size):
            _add(found, part)
            if by_rows:
                _add_rows(found, part.reshape(-1, width))
    return found


def _add(found: Figures, part: Numbers) -> None:
    if not part.size:
        return
    found.count += part.size
    low, high = float(part.min()), float(part.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        found.nans += int(np.isnan(part).sum())
        found.plus += int((part == np.inf).sum())
        found.minus += int((part == -np.inf).sum())
        part = part[np.isfinite(part)]
        if not part.size:
            return
        low, high = float(part.min()), float(part.max())
    found.low, found.high = min(found.low, low), max(found.high, high)
    square = float(np.dot(part, part))
    found.square += square if 1e-30 < square < 1e30 else float(np.square(part.astype(np.float64)).sum())
    found.zeros += part.size - int(np.count_nonzero(part))


def _add_rows(found: Figures, rows: Numbers) -> None:
    before = found.rows
    found.rows = before + len(rows)
    if found.zeros >= rows.shape[1]:
        found.empty_rows += int((~rows.any(axis=1)).sum())
    if found.bad:
        found.broken_rows += int((~np.isfinite(rows).all(axis=1)).sum())
