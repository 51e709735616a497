"""Which of several kept states to drop, so that their ages grow like those of backups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def most_crowded(attempts: Sequence[int], candidates: Iterable[int], *, now: int) -> int:
    """The candidate (an index, neither the first nor the last) whose neighbours are closest, measured by its age."""
    gaps = {i: (attempts[i + 1] - attempts[i - 1]) / (now - attempts[i]) for i in candidates}
    return min(gaps, key=lambda i: gaps[i])
