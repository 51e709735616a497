"""Batches that became so small that a norm over the batch has nothing left to go by."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from surefoot.judge.baselines import Baselines
from surefoot.judge.detectors.base import Detector
from surefoot.judge.policy import AGAIN, DOUBLE, FEW
from surefoot.records import Finding, StepMetrics


class FewSamples(Detector):
    """Speaks when a model that normalises over the batch is handed a few samples where it was handed many."""

    name: ClassVar = "few_samples"
    kept: ClassVar = ("_since",)

    def __init__(self, normal: Baselines, *, normed: bool) -> None:
        self._normal = normal
        self._normed = normed
        self._since = 0

    def rewound(self) -> None:
        self._since = 0

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        usual = self._normal.samples
        if not self._normed or row.optimizer or not (0 < row.samples <= FEW and DOUBLE * row.samples <= usual):
            self._since = 0
            return []
        self._since += 1
        if self._since != AGAIN:  # one may be the last of an epoch
            return []
        detail = f"batch norm works over {row.samples:.0f} samples, where there were {usual:.0f}"
        return self.found(row, detail, samples=row.samples, usual=usual)
