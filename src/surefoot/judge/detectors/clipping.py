"""Clipping that fires at nearly every step, or never."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from surefoot.judge.detectors.base import Detector
from surefoot.judge.policy import HUGE, LATE, PATIENCE, Thresholds
from surefoot.records import Finding, StepMetrics


class Clipping(Detector):
    name: ClassVar = "clipping"
    kept: ClassVar = ("_updates", "_unclipped", "_top", "_often_told", "_never_told")

    def __init__(self, sight: Thresholds) -> None:
        self._sight = sight
        self._updates = 0
        self._unclipped = 0
        self._top = 0.0
        self._often_told = False
        self._never_told = False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        if math.isnan(row.clip_factor) or row.optimizer or not row.applied:
            return []
        self._updates += 1
        self._unclipped = self._unclipped + 1 if row.clip_factor >= 1.0 else 0
        self._top = max(row.norm, 0.999 * self._top)
        if self._updates >= 2 * PATIENCE and row.clip_fraction > self._sight.clipped_often and not self._often_told:
            self._often_told = True
            detail = (
                f"{row.clip_fraction:.0%} of the last 100 updates were clipped at {row.clip:.3g}: this acts as a smaller "
                f"rate. The largest norms are about {self._top:.3g}; start at two to three times that."
            )
            return self.found(row, detail, share=row.clip_fraction, clip=row.clip, top=self._top)
        if self._unclipped >= LATE and row.clip > HUGE * self._top and not self._never_told:
            self._never_told = True
            detail = (
                f"nothing was clipped for {LATE} updates: the threshold of {row.clip:.3g} is far above the largest "
                f"norm of {self._top:.3g} and protects from little."
            )
            return self.found(row, detail, share=0.0, clip=row.clip, top=self._top)
        return []
