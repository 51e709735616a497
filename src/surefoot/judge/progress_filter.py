"""Which number of a row tells whether the run learns: the loss, what the loop names instead, or none."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from typing import Any

from surefoot.judge.policy import LONG, WHILE
from surefoot.records import NAN, JudgedBy, StepMetrics, Verdict


class ProgressFilter:
    """Hands out each row with `loss` being what is to be judged; NaN where nothing is.

    A loss that stays around zero with both signs (a policy gradient, whose advantages are centred) does not fall as a
    run learns, and may rise: from there on it is not judged.
    """

    def __init__(self) -> None:
        self._signs: dict[int, deque[bool]] = {}
        """Of each optimizer's last losses that landed: whether they were positive; zeros are left out."""
        self._around_zero: set[int] = set()

    def judged(self, row: StepMetrics) -> StepMetrics:
        """The row as the judge sees it; a loss that is not finite is trouble, whatever is judged."""
        judged_by = row.judged_by
        if judged_by == JudgedBy.LOSS and row.optimizer not in self._around_zero:
            return row
        if not math.isfinite(row.loss):
            return row
        if judged_by == JudgedBy.PROGRESS and math.isfinite(row.progress):
            return replace(row, loss=row.progress)
        return row if row.verdict is Verdict.NONFINITE else replace(row, loss=NAN)

    def update(self, row: StepMetrics) -> bool:
        """Take in a loss; True when it has just turned out to be no measure of progress."""
        if not row.applied or row.judged_by != JudgedBy.LOSS or not math.isfinite(row.loss) or row.loss == 0:
            return False
        signs = self._signs.setdefault(row.optimizer, deque(maxlen=LONG))
        signs.append(row.loss > 0)
        if row.optimizer in self._around_zero or not _both_signs_throughout(signs):
            return False
        self._around_zero.add(row.optimizer)
        return True

    def state_dict(self) -> dict[str, Any]:
        signs = {str(k): [int(sign) for sign in known] for k, known in self._signs.items()}
        return {"signs": signs, "around_zero": sorted(self._around_zero)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._signs = {int(k): deque(map(bool, known), maxlen=LONG) for k, known in state["signs"].items()}
        self._around_zero = set(state["around_zero"])


def _both_signs_throughout(signs: deque[bool]) -> bool:
    """Both signs in every part of the window: a loss that crosses zero on its way down has one sign on each side."""
    known = list(signs)
    parts = [known[start : start + WHILE] for start in range(0, len(known) - WHILE + 1, WHILE)]
    return bool(parts) and all(len(set(part)) == 2 for part in parts)
