"""Steps that take far longer than they did."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from surefoot.judge.baselines import Baseline
from surefoot.judge.detectors.base import Detector
from surefoot.judge.policy import WHILE, Thresholds
from surefoot.records import Finding, StepMetrics


class SlowSteps(Detector):
    """Speaks of throughput, and of waiting for data where that is the reason."""

    name: ClassVar = "pace"
    kept: ClassVar = ("_rows", "_slow", "_waiting", "_told")

    def __init__(self, sight: Thresholds) -> None:
        self._sight = sight
        self._seconds = Baseline(sight.slow_window)
        self._waits = Baseline(sight.slow_window)
        self._rows = 0
        self._slow = 0
        self._waiting = 0
        self._told = False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        if row.optimizer or not row.seconds > 0:
            return []
        self._rows += 1
        if self._rows <= WHILE:  # compilation, caches, the allocator
            return []
        wait = row.data_wait if row.data_wait > 0 else 0.0
        formed = len(self._seconds) >= self._sight.least
        usual, usual_wait = self._seconds.middle, self._waits.middle
        slow = formed and row.seconds > self._sight.slowdown * usual
        waits = (
            formed and wait > self._sight.waits * row.seconds and wait > self._sight.slowdown * max(usual_wait, 1e-3)
        )
        if not slow and not waits:
            self._slow = self._waiting = 0
            self._told = False
            self._seconds.add(row.attempt, row.seconds)
            self._waits.add(row.attempt, wait)
            return []
        self._slow += 1
        self._waiting += waits
        if self._slow < WHILE or self._told:
            return []
        self._told = True
        if self._waiting > self._slow / 2:
            detail = f"{wait / row.seconds:.0%} of a step is spent waiting for data; it was {usual_wait / usual:.0%}"
            return self.found(row, detail, data=True, wait=wait, usual=usual_wait, seconds=row.seconds)
        detail = f"a step takes {row.seconds:.3g} s, {row.seconds / usual:.3g} times as long as it did"
        return self.found(row, detail, data=False, seconds=row.seconds, usual=usual)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"seconds": self._seconds.state_dict(), "waits": self._waits.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._seconds.load_state_dict(state["seconds"])
        self._waits.load_state_dict(state["waits"])
