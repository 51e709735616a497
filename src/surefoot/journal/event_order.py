"""The order of a run's events, which several ranks write to files of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

EventKey = tuple[float, float, int, int]
"""Sorts the events of all files: the attempt, which ranks share, before the time, which they do not."""


class EventOrder:
    """Gives the events of one file their keys; they never decrease, so the order in which one process wrote is kept."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._attempt = self._time = float("-inf")
        self._line = 0

    def key(self, event: Mapping[str, Any]) -> EventKey:
        """The key of the file's next event."""
        attempt = _number(event["attempt"])
        if attempt > self._attempt:
            self._attempt, self._time = attempt, float("-inf")
        self._time = max(self._time, _number(event["time"]))
        self._line += 1
        return self._attempt, self._time, self._rank, self._line


def _number(value: Any) -> float:
    finite = isinstance(value, int | float) and abs(value) < 1e300
    return float(value) if finite else float("-inf")
