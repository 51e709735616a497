"""Which of several kept states to drop, so that their ages grow like those of backups."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol


class KeptState(Protocol):
    """The state of a run after one attempt."""

    attempt: int
    good: bool
    in_use: bool


def next_to_drop(states: Sequence[KeptState], now: int, max_age: int) -> int | None:
    """The index of the oldest state if it is too old, else of the one whose neighbours are closest for its age, among
    the good ones if possible; None where all are needed.

    The newest good state stays, and so does the oldest unproven one, which will be proven next: if it were dropped for
    younger ones, none would ever be proven. All ranks with the same states drop the same.
    """
    newest_good = max((i for i, state in enumerate(states) if state.good), default=-1)
    oldest_unproven = next((i for i, state in enumerate(states) if not state.good), -1)
    needed = newest_good, oldest_unproven
    removable = [i for i, state in enumerate(states) if not state.in_use and i not in needed]
    between = [i for i in removable if i > 0]
    if 0 in removable and (not between or _oldest_is_too_old(states, now, max_age)):
        return 0
    good = [i for i in between if states[i].good]
    attempts = [*(state.attempt for state in states), now]
    return most_crowded(attempts, good or between, now=now) if between else None


def _oldest_is_too_old(states: Sequence[KeptState], now: int, max_age: int) -> bool:
    """The next one reaches back far enough; the initial state is kept for longer."""
    age, next_age = (now - state.attempt for state in states[:2])
    return age > 2 * max_age or (next_age >= max_age and states[0].attempt >= 0)


def most_crowded(attempts: Sequence[int], candidates: Iterable[int], *, now: int) -> int:
    """The candidate (an index, neither the first nor the last) whose neighbours are closest, measured by its age."""
    gaps = {i: (attempts[i + 1] - attempts[i - 1]) / (now - attempts[i]) for i in candidates}
    return min(gaps, key=lambda i: gaps[i])
