"""Chooses the number that shows whether the run learns: the loss, the loop's own measure of progress, or none."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import replace
from typing import Any

from surefoot.judge.thresholds import BASELINE_ROWS, WINDOW_ROWS
from surefoot.records import NAN, Finding, JudgedBy, StepMetrics, Verdict


class ProgressFilter:
    """Returns each row with `loss` set to the number to judge; NaN where nothing is judged.

    A loss that stays around zero with both signs (a policy gradient with centred advantages) does not fall as the run
    learns, and may rise: from then on it is not judged.
    """

    def __init__(self) -> None:
        self._signs: dict[int, deque[bool]] = {}
        """By optimizer, for the last applied losses: whether they were positive; zeros are left out."""
        self._around_zero: set[int] = set()
        """Optimizers whose loss is not judged any more."""

    def judged(self, row: StepMetrics) -> StepMetrics:
        """The row as the judge sees it; a non-finite loss is trouble, whatever is judged."""
        judged_by = row.judged_by
        if judged_by == JudgedBy.LOSS and row.optimizer not in self._around_zero:
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
        signs = self._signs.setdefault(row.optimizer, deque(maxlen=BASELINE_ROWS))
        signs.append(row.loss > 0)
        if row.optimizer in self._around_zero or not _both_signs_throughout(signs):
            return False
        self._around_zero.add(row.optimizer)
        return True

    def state_dict(self) -> dict[str, Any]:
        signs = {str(k): [int(sign) for sign in known] for k, known in self._signs.items()}
        return {"signs": signs, "around_zero": sorted(self._around_zero)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._signs = {int(k): deque(map(bool, known), maxlen=BASELINE_ROWS) for k, known in state["signs"].items()}
        self._around_zero = set(state["around_zero"])


def _both_signs_throughout(signs: deque[bool]) -> bool:
    """Both signs in every 16 rows of the window: a loss that crosses zero on its way down has one sign on each side."""
    known = list(signs)
    parts = [known[start : start + WINDOW_ROWS] for start in range(0, len(known) - WINDOW_ROWS + 1, WINDOW_ROWS)]
    return bool(parts) and all(len(set(part)) == 2 for part in parts)


def not_judged_finding(row: StepMetrics) -> Finding:
    """Reports that the loss is no measure of progress, and what to pass instead."""
    return Finding(
        step=row.step,
        attempt=row.attempt,
        time=row.time,
        detector="progress",
        detail="the loss stays around zero with both signs, so it is only checked for being finite; pass "
        "guard.watch(loss, progress=...) a number that falls as the run improves, such as -reward",
        evidence={"loss": row.loss, "optimizer": row.optimizer},
    )
