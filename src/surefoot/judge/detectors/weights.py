"""Weights that something else than the optimizer has written to."""

from __future__ import annotations

import itertools
import math
from typing import ClassVar

import numpy as np

from surefoot.judge.detectors.base import Detector
from surefoot.judge.policy import CLEARLY, FEW, MANIFOLD, WHILE
from surefoot.records import Finding, StepMetrics


class Weights(Detector):
    """Speaks when their norm has leapt between two looks by more than updates as large as those seen could move it."""

    name: ClassVar = "weights"
    kept: ClassVar = ("_at", "_norms", "_ratios")

    def __init__(self) -> None:
        self._at: list[int] = []
        self._norms: list[float] = []
        self._ratios: list[float] = []

    def rewound(self) -> None:
        """Those of the states that were left tell nothing of the one that the run has gone back to."""
        self._at, self._norms = [], []

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        if not 0 < row.weight_norm < math.inf:
            return []
        if row.update_ratio > 0:
            self._ratios = [*self._ratios, row.update_ratio][-FEW:]
        found = self._leapt(row) if len(self._norms) > 1 and row.attempt > WHILE // 2 else []
        self._at = [*self._at, row.attempt][-FEW:]
        self._norms = [*self._norms, row.weight_norm][-FEW:]
        return found

    def _leapt(self, row: StepMetrics) -> list[Finding]:
        times = row.weight_norm / self._norms[-1]
        usual = max(abs(math.log(b / a)) for a, b in itertools.pairwise(self._norms))
        trained = (row.attempt - self._at[-1]) * max(self._ratios, default=0.0)
        leapt = abs(math.log(times))
        # Weights that move by no more than several times what they did between two looks have only been trained.
        if leapt <= max(math.log(CLEARLY), MANIFOLD * usual, trained):
            return []
        detail = f"the norm of the weights is {times:.3g} times what it was, which no update explains"
        # Where next to nothing can be left of what was learnt there is no need to wait for the loss.
        return self.found(row, detail, severe=leapt > math.log(MANIFOLD), times=times, well=self._at[-1])
