"""A loss that does not go down, or falls away as if the same data came again and again."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from surefoot.judge.baselines import Baselines
from surefoot.judge.detectors.base import Detector
from surefoot.judge.policy import NOTHING, PATIENCE, SMALL, WHILE
from surefoot.records import Finding, Pattern, StepMetrics


class Plateau(Detector):
    name: ClassVar = "plateau"
    kept: ClassVar = ("_told", "_fallen", "_best", "_since")

    def __init__(self, normal: Baselines) -> None:
        self._normal = normal
        self._told = False
        self._fallen = False
        self._best = math.inf
        self._since = 0

    def rewound(self) -> None:
        self._since = 0

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        normal = self._normal
        recent = [loss for loss in normal.recent if math.isfinite(loss)]
        if row.optimizer or not row.applied or not normal.formed or len(recent) < WHILE or normal.contested:
            return []
        mean = sum(recent) / len(recent)
        return [*self._flat(row, mean), *self._falling(row, mean, max(recent))]

    def _flat(self, row: StepMetrics, mean: float) -> list[Finding]:
        normal = self._normal
        if mean < self._best - NOTHING * abs(self._best) or math.isinf(self._best):
            self._best, self._since = mean, 0
        self._since += 1
        gained = (normal.start - mean) / abs(normal.start) if normal.start else 1.0
        if self._told or self._since < PATIENCE or gained > SMALL:
            self._told = self._told and gained <= SMALL
            return []
        self._told = True
        detail = f"the loss is {mean:.4g} and began at {normal.start:.4g}; nothing was gained for {self._since} steps"
        return self.found(row, detail, Pattern.PLATEAU, level=mean, start=normal.start)

    def _falling(self, row: StepMetrics, mean: float, top: float) -> list[Finding]:
        """Even the worst of the last losses lies below the best of those before."""
        normal = self._normal
        below = (normal.loss.middle - mean) / normal.loss.spread
        if not (below > normal.sight.raised and top < normal.loss.quantile(0.0) and normal.landed > PATIENCE):
            self._fallen = self._fallen and below > normal.sight.raised / 2
            return []
        if self._fallen:
            return []
        self._fallen = True
        detail = f"the loss has fallen from {normal.loss.middle:.4g} to {mean:.4g}, out of all proportion"
        return self.found(row, detail, Pattern.OVERFIT, level=mean, normal=normal.loss.middle)
