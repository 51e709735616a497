"""Batches that are unlike those before: one of them, all from here on, or a little more each time."""

from __future__ import annotations

import math
from collections import deque
from typing import Any, ClassVar

import numpy as np

from surefoot.judge.baselines import Baseline, held_back
from surefoot.judge.detectors.base import Detector
from surefoot.judge.policy import WHILE, Thresholds
from surefoot.records import Finding, StepMetrics


class Inputs(Detector):
    """Compares mean, spread and largest value of what comes in with what used to."""

    name: ClassVar = "inputs"
    kept: ClassVar = ("_recent", "_told", "_moved", "_quiet", "_strange")

    def __init__(self, sight: Thresholds) -> None:
        self._sight = sight
        self._means = Baseline(sight.slow_window)
        self._spreads = Baseline(sight.slow_window)
        """Of the logarithms."""
        self._waiting: deque[tuple[int, float, float]] = deque()
        self._recent: list[float] = []
        self._told = False
        self._moved = False
        self._quiet = self._strange = 0
        """Rows since an input was last strange, and strange ones in a row."""
        self.strange = 0.0
        """How unlike those before this batch is, in units of what is told; 1 and more is strange."""

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        before, self.strange = self.strange, 0.0
        if row.optimizer or math.isnan(row.input_absmax):
            return []
        if math.isinf(row.input_absmax):
            self.strange, self._quiet = math.inf, 0
            return self.found(row, "the batch holds values that are not finite", top=row.input_absmax, broken=True)
        spread = math.log(max(row.input_std, 1e-30))
        found = self._compare(row, spread, before) if len(self._means) >= self._sight.least else []
        self._quiet = 0 if self.strange >= 1 else self._quiet + 1
        self._strange = self._strange + 1 if self.strange >= 1 else 0
        if self._strange >= self._sight.window:
            self._start_over()
        if row.applied:
            self._take(row, spread)
        return found

    def _start_over(self) -> None:
        """What has been so for long is the usual from here on."""
        for known in (self._means, self._spreads):
            known.forget(-1)
        self._waiting.clear()
        self._recent, self._strange, self._told = [], 0, False

    def _take(self, row: StepMetrics, spread: float) -> None:
        self._recent = [*self._recent, row.input_mean][-WHILE:]
        if self.strange >= 1 and len(self._means) >= self._sight.least:
            return
        self._waiting.append((row.attempt, row.input_mean, spread))
        if len(self._waiting) > held_back(len(self._means)):
            attempt, mean, log = self._waiting.popleft()
            self._means.add(attempt, mean)
            self._spreads.add(attempt, log)

    def _compare(self, row: StepMetrics, spread: float, before: float) -> list[Finding]:
        sight, size = self._sight, math.exp(self._spreads.middle)
        beside = abs(row.input_mean - self._means.middle)
        wider = abs(spread - self._spreads.middle)
        by_mean = min(beside / (sight.far * self._means.spread), beside / (sight.beside * size))
        by_spread = min(wider / (sight.far * max(self._spreads.spread, 1e-3)), wider / math.log(sight.wider))
        self.strange = max(by_mean, by_spread)
        if self.strange < 1:
            self._told = False
            return self._drifts(row, size)
        if self._told:
            return []
        self._told = True
        detail = (
            f"the batch is unlike those before: mean {row.input_mean:.3g} and spread {row.input_std:.3g}, "
            f"where {self._means.middle:.3g} and {size if size > 1e-12 else 0.0:.3g} are usual"
        )
        slowly = before > self.strange / 2
        return self.found(row, detail, mean=row.input_mean, spread=row.input_std, usual=size, slowly=slowly)

    def _drifts(self, row: StepMetrics, size: float) -> list[Finding]:
        """The mean of the last inputs has left its place, by little steps."""
        if len(self._recent) < WHILE:
            return []
        moved = abs(sum(self._recent) / WHILE - self._means.middle)
        error = self._means.spread / math.sqrt(WHILE)
        beyond = moved > self._sight.far * error and moved > self._sight.moved * size
        if not beyond or self._moved:
            self._moved = self._moved and moved > self._sight.far * error / 2
            return []
        self._moved = True
        detail = f"the inputs have moved by {moved:.3g}, little by little; their spread is {size:.3g}"
        return self.found(row, detail, moved=moved, spread=size, slowly=self._quiet > WHILE)

    def rewound(self) -> None:
        self._told = False

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {
            "means": self._means.state_dict(),
            "spreads": self._spreads.state_dict(),
            "waiting": [list(one) for one in self._waiting],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._means.load_state_dict(state["means"])
        self._spreads.load_state_dict(state["spreads"])
        self._waiting = deque((int(a), m, s) for a, m, s in state["waiting"])
