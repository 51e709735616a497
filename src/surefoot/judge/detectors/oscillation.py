"""A loss that swings up and down, wider and wider."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from surefoot.judge.baselines import Baselines
from surefoot.judge.detectors.base import Detector
from surefoot.judge.loss_shape import shape
from surefoot.records import Finding, Pattern, StepMetrics


class Oscillation(Detector):
    name: ClassVar = "oscillation"
    kept: ClassVar = ("_told",)

    def __init__(self, normal: Baselines) -> None:
        self._normal = normal
        self._told = False

    def rewound(self) -> None:
        self._told = False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        normal = self._normal
        if row.optimizer or not normal.formed or not math.isfinite(row.loss):
            return []
        z = normal.z(row.loss)
        swings = (self._told or z > normal.sight.far) and shape(list(normal.recent)) is Pattern.OSCILLATING
        if self._told or not swings or not z > normal.sight.far:
            self._told = self._told and (swings or z > 1.0)  # between two swings it is low for a step
            return []
        self._told = True
        detail = f"the loss swings wider and wider, and has reached {row.loss:.4g}"
        return self.found(row, detail, Pattern.OSCILLATING, loss=row.loss, deviations=z)
