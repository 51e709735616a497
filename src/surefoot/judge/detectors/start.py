"""Gradients that explode from the very first step on."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from surefoot.judge.detectors.base import Detector
from surefoot.judge.policy import FEW, Thresholds
from surefoot.records import Finding, StepMetrics


class Start(Detector):
    """Speaks once, of the first few rows: later ones have a past to be compared with."""

    name: ClassVar = "start"
    kept: ClassVar = ("_norms",)

    def __init__(self, sight: Thresholds) -> None:
        self._sight = sight
        self._norms: list[float] = []

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        if row.optimizer or not row.applied or len(self._norms) >= FEW:
            return []
        self._norms = [*self._norms, row.norm]
        middle = sorted(self._norms)[len(self._norms) // 2]
        if len(self._norms) < FEW or not middle > self._sight.explodes:
            return []
        return self.found(row, f"the first gradients have norms of about {middle:.3g}", norm=middle)
