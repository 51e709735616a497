"""A change of a number: what kind, since when, how large, and whether it is over."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class ChangeKind(StrEnum):
    SPIKE = "spike"
    """Came back soon."""
    SHIFT = "shift"
    """Rose within a few rows."""
    DRIFT = "drift"
    """Rose slowly, after it had been level or falling."""
    TREND = "trend"
    """Rose slowly, and had not been lower than in the beginning."""


@dataclass(slots=True)
class Change:
    """A rise above the level that was accepted last."""

    kind: ChangeKind
    onset: int
    """First row of it."""
    found: int
    """Row at which it was certain."""
    reference: float
    """The level before it."""
    noise: float
    """The noise before it."""
    margin: float
    """How far above the reference counts as back."""
    size: float
    """The highest level since, above the reference."""
    latest: int
    """Row at which it was last seen to rise."""
    end: int | None = None
    """Row at which the level before was reached again; None while it is not."""

    @property
    def slow(self) -> bool:
        """Whether it rose too slowly to be seen from row to row."""
        return self.kind in (ChangeKind.DRIFT, ChangeKind.TREND)
