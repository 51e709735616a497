"""What the judge remembers from row to row: losses and norms, whether the loss measures progress at all, refusals in a
row, and the decision whose effect has yet to arrive."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from typing import Any

from surefoot.judge.thresholds import BASELINE_ROWS, HISTORY_ROWS, REPEAT_COUNT, UPDATES_IN_FLIGHT, WINDOW_ROWS
from surefoot.records import NAN, REFUSED, Action, JudgedBy, StepMetrics, Verdict


class History:
    """The last 100 losses and norms of one optimizer, with the first and second difference of the loss."""

    def __init__(self) -> None:
        self.losses: deque[float] = deque(maxlen=HISTORY_ROWS)
        self.norms: deque[float] = deque(maxlen=HISTORY_ROWS)
        self.clipped: deque[bool] = deque(maxlen=HISTORY_ROWS)
        self.replica_norm = math.nan
        """Norm of the replicated weights when they were last found equal on all ranks."""
        self.unequal: deque[bool] = deque(maxlen=REPEAT_COUNT)
        """For each of the last applied updates: whether the ranks applied different gradients."""
        self.others: dict[int, History] = {}
        """Histories of the other optimizers, by number: losses of two that step in turn are two series."""

    @property
    def ranks_unequal(self) -> bool:
        """The ranks keep applying different gradients, in one of the optimizers; once or twice may be a fault."""
        return any(list(history.unequal) == [True] * REPEAT_COUNT for history in (self, *self.others.values()))

    def of(self, optimizer: int) -> History:
        """The history of one optimizer; this one is that of the first."""
        return self if optimizer == 0 else self.others.setdefault(optimizer, History())

    def clip_fraction(self, factor: float) -> float:
        """Add an update's clip factor and return the fraction of the last 100 updates that were clipped."""
        self.clipped.append(factor < 1.0)
        return sum(self.clipped) / len(self.clipped)

    def add(self, loss: float, norm: float) -> tuple[float, float]:
        """Add one update and return the loss's first and second difference."""
        d1 = loss - self.losses[-1] if self.losses else math.nan
        d2 = d1 - (self.losses[-1] - self.losses[-2]) if len(self.losses) > 1 else math.nan
        self.losses.append(loss)
        self.norms.append(norm)
        return d1, d2

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            "losses": list(self.losses),
            "norms": list(self.norms),
            "clipped": list(self.clipped),
        }
        if self.others:
            state["others"] = {k: history.state_dict() for k, history in self.others.items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.losses = deque(state["losses"], maxlen=HISTORY_ROWS)
        self.norms = deque(state["norms"], maxlen=HISTORY_ROWS)
        self.clipped = deque(state["clipped"], maxlen=HISTORY_ROWS)
        self.others = {}
        for k, history in state.get("others", {}).items():
            self.of(int(k)).load_state_dict(history)


AROUND_ZERO = (
    "the loss stays around zero with both signs, so it is only checked for being finite; pass "
    "guard.watch(loss, progress=...) a number that falls as the run improves, such as -reward"
)
"""Why the loss of a run is not judged."""


class ProgressFilter:
    """Returns each row with `loss` set to the number to judge; NaN where nothing is judged.

    A loss that stays around zero with both signs (a policy gradient with centred advantages) does not fall as the run
    learns, and may rise: from then on it is not judged.
    """

    def __init__(self) -> None:
        self._signs: dict[int, deque[bool]] = {}
        """By optimizer, for the last applied losses: whether they were positive; zeros are left out."""
        self.around_zero: set[int] = set()
        """Optimizers whose loss is not judged any more."""

    def judged(self, row: StepMetrics) -> StepMetrics:
        """The row as the judge sees it; a non-finite loss is trouble, whatever is judged."""
        judged_by = row.judged_by
        if judged_by == JudgedBy.LOSS and row.optimizer not in self.around_zero:
            return row
        if not math.isfinite(row.loss):
            return row
        if judged_by == JudgedBy.PROGRESS and math.isfinite(row.progress):
            return replace(row, loss=row.progress)
        return row if row.verdict is Verdict.NONFINITE else replace(row, loss=NAN)

    def update(self, row: StepMetrics) -> bool:
        """Add a loss; True when it has just turned out to be no measure of progress."""
        if not row.applied or row.judged_by != JudgedBy.LOSS or not math.isfinite(row.loss) or row.loss == 0:
            return False
        signs = self._signs.get(row.optimizer)
        if signs is None:
            signs = self._signs[row.optimizer] = deque(maxlen=BASELINE_ROWS)
        signs.append(row.loss > 0)
        one_sign = signs.count(True) in (0, len(signs))
        if one_sign or row.optimizer in self.around_zero or not _both_signs_throughout(signs):
            return False
        self.around_zero.add(row.optimizer)
        return True

    def state_dict(self) -> dict[str, Any]:
        signs = {str(k): [int(sign) for sign in known] for k, known in self._signs.items()}
        return {"signs": signs, "around_zero": sorted(self.around_zero)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._signs = {int(k): deque(map(bool, known), maxlen=BASELINE_ROWS) for k, known in state["signs"].items()}
        self.around_zero = set(state["around_zero"])


def _both_signs_throughout(signs: deque[bool]) -> bool:
    """Both signs in every 16 rows of the window: a loss that crosses zero on its way down has one sign on each side."""
    known = list(signs)
    parts = [known[start : start + WINDOW_ROWS] for start in range(0, len(known) - WINDOW_ROWS + 1, WINDOW_ROWS)]
    return bool(parts) and all(len(set(part)) == 2 for part in parts)


class RefusalCounter:
    """Counts refused updates and overflows since one was applied.

    An update counts once, however many optimizers took part in it.
    """

    def __init__(self) -> None:
        self.refused = 0
        """Refused updates in a row."""
        self.overflows = 0
        """Overflows of the loss scale in a row."""
        self.attempt = -1
        """The last attempt that was counted."""

    def update(self, row: StepMetrics) -> None:
        if row.applied:
            self.refused = self.overflows = 0
        if row.attempt != self.attempt:
            if not row.applied:
                self.refused += row.verdict in REFUSED
                self.overflows += row.verdict is Verdict.OVERFLOW
            self.attempt = row.attempt

    @property
    def old_news(self) -> bool:
        """Beyond 64 refusals in a row, only the 128th, the 256th and so on are reported."""
        return self.refused > BASELINE_ROWS and self.refused & (self.refused - 1) != 0

    def state_dict(self) -> dict[str, Any]:
        return {"refused": self.refused, "overflows": self.overflows, "attempt": self.attempt}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.refused, self.overflows, self.attempt = state["refused"], state["overflows"], state["attempt"]


class PendingEffect:
    """The effect of the last decision, as long as it has not arrived.

    After a rewind was decided, rows do not count until it has happened. After any other decision, updates under way
    were still made without it.
    """

    def __init__(self) -> None:
        self.rewind = False
        self._blind_until = -1
        """The last attempt that was made before the decision took effect."""

    def __bool__(self) -> bool:
        return self.rewind or self._blind_until >= 0

    def decided(self, actions: set[Action], attempt: int) -> None:
        """Such decisions were made at this attempt."""
        if Action.REWIND in actions:
            self.rewind = True
        elif Action.CONSTRAIN in actions:
            self.in_force(attempt)

    def in_force(self, attempt: int) -> None:
        """A decision without a rewind was made at this attempt."""
        self.rewind, self._blind_until = False, attempt + UPDATES_IN_FLIGHT

    def arrived(self, attempt: int) -> bool:
        """This attempt is the first that was made with the last decision in force."""
        return not self.rewind and 0 <= self._blind_until < attempt

    def clear(self) -> None:
        self.rewind, self._blind_until = False, -1

    @property
    def blind_until(self) -> int:
        """The last attempt before a decision without a rewind took effect; -1 where none is pending."""
        return -1 if self.rewind else self._blind_until

    def load(self, *, rewind: bool, blind_until: int) -> None:
        self.rewind, self._blind_until = rewind, blind_until
