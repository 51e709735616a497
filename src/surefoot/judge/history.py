"""The last losses and gradient norms of a run, and whether its loss is a measure of progress at all."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from typing import Any

from surefoot.judge.thresholds import BASELINE_ROWS, HISTORY_ROWS, REPEAT_COUNT, WINDOW_ROWS
from surefoot.records import NAN, JudgedBy, StepMetrics, Verdict


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
