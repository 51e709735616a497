"""A loss that has risen and stays there."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from surefoot.judge.detect.base import Detector
from surefoot.judge.detect.units import Units
from surefoot.judge.normal import LAST, Normal
from surefoot.records import Finding, Pattern, Row


class Level(Detector):
    """Speaks when the level rises, and again when the run has lost what it had learnt: that is grave."""

    name: ClassVar = "level"
    kept: ClassVar = ("_told", "_grave")

    def __init__(self, normal: Normal, units: Units) -> None:
        self._normal = normal
        self._units = units
        self._told = False
        self._grave = False

    def rewound(self) -> None:
        self._told = self._grave = False

    def update(self, row: Row, layers: np.ndarray | None = None) -> list[Finding]:
        normal, sight = self._normal, self._normal.sight
        recent = [loss for loss in normal.recent if math.isfinite(loss)]
        if row.optimizer or not normal.formed or len(recent) < sight.lasting:
            return []
        last = sorted(recent[-sight.lasting :])
        level = last[len(last) // 2]
        sudden = normal.z(level)
        slow = normal.z(_mean(recent)) if len(recent) == LAST else 0.0
        if sudden < sight.raised and slow < sight.creeping:
            self._told &= sudden > sight.raised / 2 or slow > sight.creeping / 2
            self._grave &= self._told
            return []
        real = level / self._units.lately  # whatever unit it is told in
        lost = sudden > sight.far and real > max(sight.lost * normal.start, normal.loss.top) > 0 and row.landed
        if self._told and (self._grave or not lost):
            return []
        grave, self._told, self._grave = lost, True, self._grave or lost
        shown = level if sudden >= sight.raised else _mean(recent)
        far = max(sudden, slow) if sudden < sight.raised else sudden
        compared = f"{shown / normal.start:.3g} times what it began with" if grave else f"{far:.3g} deviations"
        return self.found(
            row,
            f"the loss has risen from {normal.loss.middle:.4g} to {shown:.4g} and stays there ({compared})",
            Pattern.JUMP if sudden > sight.far else Pattern.NONE,
            grave=grave,
            level=shown,
            normal=normal.loss.middle,
            deviations=far,
            of_start=shown / normal.start if normal.start else math.nan,
        )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
