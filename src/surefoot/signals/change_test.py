"""A sequential test for a number that rises above what is normal for it: a spike, a shift, a drift or a trend.

Values are on a scale on which noise is about equal everywhere: the logarithm of a loss or of a norm. Two statistics
look at the same baseline: a cumulated sum finds what rises within a few rows, and the history of levels what rises too
slowly for that. Values that are not accepted never move the level a change is measured from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from surefoot.signals.baseline import MIN_STRETCH, Floats, LevelBaseline
from surefoot.signals.change import Change, ChangeKind
from surefoot.signals.dating import locate_rise
from surefoot.signals.slow_rise import SMOOTH, slow_rise

MIN_SIZE = 0.025
"""A smaller rise does not matter: 2.5 % on a logarithmic scale."""
MIN_NOISE = 0.004
"""Least noise assumed: without any, every wobble would be a change."""
SLACK = 0.5
"""Rise, in deviations of the noise, that the cumulated sum forgives in each row."""
WANDERS = 3.0
"""And this many times what the level wanders by itself."""
MAX_STEP = 2.5
"""A single value adds at most this many deviations, so that heavy tails alone raise no alarm."""
MAX_OPEN = 8
"""Changes upon changes that are kept apart."""
DOUBTFUL = 1.0 / 3
"""No level is learnt while the sum is above this share of its threshold: these values may yet be refused."""
MIN_RECENT = 8
"""Fewer values since the level was learnt are no level of their own."""
START, MIN_START_RISE, START_DEVIATIONS = 4, 0.4, 6.0
"""The first values, above whose median by so much, and so many deviations, the first level may not be."""
SAME_CHANGE_ROWS, SAME_CHANGE_SHARE = 4 * MIN_STRETCH, 0.02
"""A further rise within so many rows, or this share of the run, belongs to the same change."""
SETTLED = 1.0 / 8
"""While a change is open, it is looked at again after this share of its age."""
RETURN_ERRORS = 3.0
"""Standard errors within which a level is the same as before."""
SPIKE_SHARE = 0.02
"""A shift that came back within this share of the run was a spike."""


def alarm_threshold(false_alarms: float) -> float:
    """The cumulated sum at which so many alarms a 100,000 rows are false (Siegmund's approximation)."""
    between = 1e5 / false_alarms
    height = 1.0
    while (np.exp(2 * SLACK * height) - 2 * SLACK * height - 1) / (2 * SLACK**2) < between:
        height += 0.01
    return height - 1.166


class ChangeTest:
    """Feed it values, one or many at a time; `changes` lists what it found, `open` what has not come back.

    >>> test = ChangeTest()
    >>> noise = np.random.default_rng(0).normal(0, 0.02, 400)
    >>> test.feed(noise), [change.onset for change in test.feed(noise[:50] + 1.0)]
    ([], [400])
    """

    def __init__(self, *, false_alarms: float = 0.1, min_size: float = MIN_SIZE) -> None:
        """`false_alarms`: the target of false alarms in 100,000 healthy rows."""
        self.threshold = alarm_threshold(false_alarms)
        self.deviations = float(np.sqrt(2 * np.log(1e5 / false_alarms)))
        """As many deviations of normal noise are as rare."""
        self.min_size = min_size
        self.baseline = LevelBaseline(MIN_NOISE)
        self.changes: list[Change] = []
        self.rows = 0
        self._pending: Floats = np.empty(0)
        """Values since the level was learnt last; the last of them is row `rows` - 1."""
        self._sum = 0.0
        self._zero = 0
        """First row since the sum was 0."""

    @property
    def open(self) -> list[Change]:
        return [change for change in self.changes if change.end is None]

    @property
    def first_open(self) -> Change | None:
        """The first change that has not come back."""
        return next((change for change in self.changes if change.end is None), None)

    def feed(self, values: Floats) -> list[Change]:
        """Take in finite values; returns the changes found in them."""
        known = len(self.changes)
        values = np.asarray(values, dtype=np.float64)
        while len(values):
            room = max(self._stretch_length() - len(self._pending), 1)
            piece = values[:room]
            at = self._find_alarm(piece) if self.baseline.known else None
            taken = len(piece) if at is None else at + 1
            self._pending = np.concatenate([self._pending, piece[:taken]])
            self.rows += taken
            values = values[taken:]
            if at is not None:
                self._open_shift()
            elif len(self._pending) >= self._stretch_length() and self._sum <= DOUBTFUL * self.threshold:
                self._end_stretch()
        return self.changes[known:]

    def level_now(self) -> float:
        """The level of the last few rows."""
        recent = self._pending[-max(MIN_RECENT, len(self._pending) // 2) :]
        if self.baseline.known and len(recent) < MIN_RECENT:
            return self.baseline.level
        return float(np.median(recent)) if len(recent) else float("nan")

    def state_dict(self) -> dict[str, Any]:
        """All that was learnt, as JSON can hold it."""
        return {
            "rows": self.rows,
            "pending": self._pending.tolist(),
            "sum": self._sum,
            "zero": self._zero,
            "changes": [{**asdict(change), "kind": str(change.kind)} for change in self.changes],
            "baseline": self.baseline.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.rows, self._zero, self._sum = int(state["rows"]), int(state["zero"]), float(state["sum"])
        self._pending = np.array(state["pending"], float)
        self.changes = [Change(**{**one, "kind": ChangeKind(one["kind"])}) for one in state["changes"]]
        self.baseline.load_state_dict(state["baseline"])

    def _stretch_length(self) -> int:
        first = self.first_open
        if first is None:
            return self.baseline.stretch_length(self.rows)
        age = self.rows - first.found
        return int(max(MIN_STRETCH, min(SETTLED * age, self.baseline.stretch_length(self.rows))))

    def _find_alarm(self, piece: Floats) -> int | None:
        """The index of the value at which the cumulated sum goes through the threshold."""
        base = self.baseline
        moves = (piece - base.level) / base.noise
        moves -= SLACK + WANDERS * base.wander / base.noise
        np.clip(moves, -2 * MAX_STEP, MAX_STEP, out=moves)
        path = self._sum + np.cumsum(moves)
        lowest = np.minimum.accumulate(np.minimum(path, 0.0))
        path -= lowest
        limit = self.threshold * float(np.sqrt(base.memory))
        if path.max() > limit:
            at = int(np.argmax(path > limit))
            self._note_zero(path[: at + 1])
            return at
        self._note_zero(path)
        self._sum = float(path[-1])
        return None

    def _note_zero(self, path: Floats) -> None:
        zeros = np.flatnonzero(path <= 0)
        if len(zeros):
            self._zero = self.rows + int(zeros[-1]) + 1

    def _open_shift(self) -> None:
        """The sum has gone through the threshold: date the rise, and accept nothing from there on."""
        base = self.baseline
        since = min(max(len(self._pending) - (self.rows - self._zero), 0), len(self._pending) - 1)
        # What rose right after a level was learnt may have begun before: in the values it was learnt from.
        earlier = base.last[-MIN_STRETCH // 2 :] if since < MIN_RECENT else base.last[:0]
        since = 0 if len(earlier) else since
        since += locate_rise(np.concatenate([earlier, self._pending[since:]]), base.level, base.noise) - len(earlier)
        before = self._pending[: max(since, 0)]
        self._pending = np.concatenate(
            [earlier[len(earlier) + since :] if since < 0 else earlier[:0], self._pending[max(since, 0) :]]
        )
        onset = self.rows - len(self._pending)
        if self.first_open is None and len(before) >= MIN_STRETCH:
            base.accept(onset - len(before), before)
        reference = base.level
        if self.first_open is None and len(before) >= MIN_RECENT:  # it may have fallen since the level was learnt
            reference = min(reference, float(np.median(before[-MIN_STRETCH:])))
        size = float(np.median(self._pending)) - reference
        self._record(ChangeKind.SHIFT, onset, reference, size, max(self.min_size, RETURN_ERRORS * base.wander))
        base.forget_level()
        self._sum, self._zero = 0.0, self.rows

    def _record(self, kind: ChangeKind, onset: int, reference: float, size: float, margin: float) -> None:
        still = self.open
        last = still[-1] if still else None
        if last is not None and (len(still) >= MAX_OPEN or onset - last.latest <= self._same_change_rows()):
            last.size = max(last.size, size + reference - last.reference)
            last.latest = self.rows
            return
        self.changes.append(Change(kind, onset, self.rows, reference, self.baseline.noise, margin, size, self.rows))

    def _same_change_rows(self) -> float:
        return max(SAME_CHANGE_ROWS, SAME_CHANGE_SHARE * self.rows)

    def _end_stretch(self) -> None:
        """Enough values to learn a level from."""
        values, self._pending = self._pending, np.empty(0)
        base = self.baseline
        row = self.rows - len(values)
        if not base.known and not self.changes and self._rose_at_start(values):
            base.learn(values[-MIN_STRETCH // 2 :])
            return
        opened = self.open
        if all(change.slow for change in opened):
            base.accept(row, values)
        else:
            base.learn(values)
        if opened:
            self._look_for_return()
        else:
            self._look_for_drift()
        self._sum, self._zero = 0.0, self.rows

    def _rose_at_start(self, values: Floats) -> bool:
        """Whether the first level is far above the first values: it is not accepted then."""
        start, rest = values[:START], values[-len(values) // 4 :]
        before, noise = float(np.median(start)), max(float(np.median(np.abs(np.diff(rest)))), MIN_NOISE)
        rise = float(np.median(rest)) - before
        if rise < max(MIN_START_RISE, START_DEVIATIONS * noise):
            return False
        at = START // 2 + locate_rise(values[START // 2 :], before, noise)
        self.changes.append(
            Change(ChangeKind.SHIFT, at, self.rows, before, noise, self.min_size + noise, rise, self.rows)
        )
        return True

    def _look_for_return(self) -> None:
        """Close the changes whose level before is reached again."""
        for change in self.open:
            rise = self._rise_now(change)
            change.size = max(change.size, rise)
            if rise <= (change.margin / 2 if change.slow else change.margin):
                change.end = self.rows
                if not change.slow and self.rows - change.onset <= SPIKE_SHARE * self.rows + MIN_STRETCH:
                    change.kind = ChangeKind.SPIKE

    def _rise_now(self, change: Change) -> float:
        """Above the level before; for a slow change, seen over as long as it took to be seen."""
        if not change.slow:
            return self.baseline.level - change.reference
        return float(np.mean(self.baseline.history.levels[-SMOOTH:])) - change.reference

    def _look_for_drift(self) -> None:
        history = self.baseline.history
        rise = slow_rise(history, self.deviations)
        if rise is None or rise.size <= max(self.min_size, rise.margin):
            return
        kind = ChangeKind.TREND if rise.from_start else ChangeKind.DRIFT
        margin = max(self.min_size, rise.margin)
        self._record(kind, history.rows[rise.block], rise.best, rise.size, margin)
