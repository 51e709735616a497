"""The loop's own clipping is another one than it was: loosened, lost, or so tight that next to nothing is left."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from surefoot.judge.baselines import Baselines
from surefoot.judge.detectors.base import Detector
from surefoot.judge.policy import AGAIN, SMALL
from surefoot.records import Finding, StepMetrics


class LostClip(Detector):
    """Knows a loop that clips nearly every gradient by norms that are all the same, though the gradients are not."""

    name: ClassVar = "lost_clip"
    kept: ClassVar = ("_beyond", "_told")

    def __init__(self, normal: Baselines) -> None:
        self._normal = normal
        self._beyond = 0
        self._told = False

    def rewound(self) -> None:
        self._beyond, self._told = 0, False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        known, raw, handed = self._normal.applied, self._normal.norms.get(0), self._normal.handed(row)
        if row.optimizer or raw is None or len(known) < self._normal.sight.least or not 0 < handed < math.inf:
            return []
        times = self._times(row, math.log(handed))
        if times == 1.0:
            self._beyond, self._told = 0, False
            return []
        self._beyond += 1
        if self._beyond < AGAIN or self._told:
            return []
        self._told = True
        usual = math.exp(known.middle)
        detail = (
            f"the loop used to hand over gradients of norm {usual:.3g}, and now {handed:.3g}, {times:.3g} times that"
        )
        return self.found(row, detail, usual=usual, handed=handed, times=times)

    def _times(self, row: StepMetrics, handed: float) -> float:
        """How many times the usual norm is handed over, if that is the loop's doing; else 1."""
        known, raw, sight = self._normal.applied, self._normal.norms[0], self._normal.sight
        times = math.exp(handed - known.middle)
        # Where clipping sets the norms, they hardly differ from each other.
        clips = known.spread < SMALL and known.middle < raw.middle - SMALL
        if clips and times > sight.unclipped:
            return times
        left = handed - math.log(row.norm) - (known.middle - raw.middle) if row.norm > 0 else 0.0
        return times if left < -math.log(sight.still) and self._normal.norm_ratio(row) <= 0 else 1.0
