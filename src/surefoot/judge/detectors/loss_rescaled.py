"""Loss and all gradients multiplied by one factor: the loss is in another unit, or divided by too little."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from surefoot.judge.baselines import Baselines
from surefoot.judge.detectors.base import Detector
from surefoot.judge.detectors.layers import NORM, LayerPast
from surefoot.judge.policy import AGAIN, ALIKE, CLEARLY, FEW, MANIFOLD, PART
from surefoot.records import Finding, StepMetrics


class LossRescaled(Detector):
    name: ClassVar = "units"
    kept: ClassVar = ("_told", "factor", "_factors")

    def __init__(self, normal: Baselines, past: LayerPast) -> None:
        self._normal = normal
        self._past = past
        self._told = False
        self.factor = 1.0
        """What the loss has been multiplied by at this step, as far as the numbers say; 1 when it was not."""
        self._factors: list[float] = []

    def rewound(self) -> None:
        self._told, self.factor, self._factors = False, 1.0, []

    @property
    def lately(self) -> float:
        """The middle one of the last few steps' factors."""
        return sorted(self._factors)[len(self._factors) // 2] if self._factors else 1.0

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        # One side of a game that gains ground makes the loss and all gradients of the other one grow alike.
        self.factor = 1.0 if self._normal.contested else self._factor(row, layers)
        self._factors = [*self._factors, self.factor][-FEW:]
        self._told = self._told and self.factor != 1.0
        # Rows of a small batch scatter; and harder batches, one after the other, may look like a small factor.
        if self.factor == 1.0 or self._told or sum(f != 1.0 for f in self._factors) < AGAIN + (self.factor < MANIFOLD):
            return []
        self._told = True
        detail = f"the loss and all gradients are about {self.factor:.3g} times what they were"
        return self.found(row, detail, factor=self.factor)

    def _factor(self, row: StepMetrics, layers: np.ndarray | None) -> float:
        past, normal = self._past, self._normal
        if layers is None or row.optimizer or not past.formed or not normal.loss.middle > 0 or not row.loss > 0:
            return 1.0
        loss = math.log(row.loss / normal.loss.middle)
        # Smaller batches make all gradients larger, and now and then the loss too; so may chance, where losses scatter.
        stands_out = normal.z(row.loss) > normal.sight.raised
        if not loss < math.inf or not stands_out or normal.wider > 1:
            return 1.0
        fit = (layers[:, NORM] > 0) & np.isfinite(layers[:, NORM]) & np.isfinite(past.usual)
        if fit.sum() < 3:
            return 1.0
        ratios = np.log(layers[fit, NORM].astype(np.float64)) - past.usual[fit]
        middle = float(np.median(ratios))
        apart = max(ALIKE, PART * middle)  # nothing but a factor multiplies all alike by very much
        if middle < math.log(CLEARLY) or abs(loss - middle) > apart:
            return 1.0
        low, high = np.quantile(ratios, (PART, 1 - PART))
        if high - low > CLEARLY * apart:
            return 1.0
        return math.exp(middle)
