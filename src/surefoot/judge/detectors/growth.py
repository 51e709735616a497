"""Growth that feeds on itself: a loss or a norm that is larger at every step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from surefoot.judge.baselines import Baselines
from surefoot.judge.detectors.base import Detector
from surefoot.judge.policy import AGAIN
from surefoot.records import Finding, Pattern, StepMetrics

STEPS = 2 * AGAIN
"""Steps in a row that must each be larger."""


class Growth(Detector):
    name: ClassVar = "growth"
    kept: ClassVar = ("_losses", "_norms", "_told")

    def __init__(self, normal: Baselines) -> None:
        self._normal = normal
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._told = False

    def rewound(self) -> None:
        self._losses, self._norms, self._told = [], [], False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        if row.optimizer or not row.applied:
            return []
        self._losses = [*self._losses, row.loss][-STEPS - 1 :]
        self._norms = [*self._norms, row.norm][-STEPS - 1 :]
        loss, norm = _rise(self._losses), _rise(self._norms)
        if loss == norm == 0.0:
            self._told = False
            return []
        what, rise = ("loss", loss) if loss >= norm else ("gradient norm", norm)
        raised = self._normal.sight.raised
        above = self._normal.norm_z(row) > raised or self._normal.z(row.loss) > raised
        if rise < self._normal.sight.growing or not above:
            self._told = self._told and rise > 1.0
            return []
        if self._told:
            return []
        self._told = True
        detail = f"the {what} has grown at each of the last {STEPS} steps, {rise:.3g} times in all"
        return self.found(row, detail, Pattern.EXPONENTIAL, rise=rise, of=what, loss=row.loss, norm=row.norm)


def _rise(values: Sequence[float]) -> float:
    """How many times the values have grown, if they did at every step; else 0."""
    if (
        len(values) <= STEPS
        or not values[-1] > values[-2]
        or not all(0.0 < a < b < math.inf for a, b in itertools.pairwise(values))
    ):
        return 0.0
    return values[-1] / values[0]
