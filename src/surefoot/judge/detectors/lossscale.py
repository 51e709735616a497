"""The loss scale of float16: overflow after overflow, or a scale so low that small gradients become zero."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from surefoot.judge.detectors.base import Detector
from surefoot.judge.policy import MANIFOLD, NOTHING, STRETCH, Thresholds
from surefoot.records import Finding, Pattern, StepMetrics, Verdict


class LossScale(Detector):
    name: ClassVar = "loss_scale"
    kept: ClassVar = ("_usual", "_landed", "_skipped", "_streak_told", "_low_told", "_by_skips")

    def __init__(self, sight: Thresholds) -> None:
        self._sight = sight
        self._usual = math.nan
        self._landed = 0
        self._skipped = 0
        self._streak_told = False
        self._low_told = False
        self._by_skips = 0

    def rewound(self) -> None:
        self._skipped, self._by_skips, self._streak_told, self._low_told = 0, 0, False, False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        if math.isnan(row.loss_scale) or row.optimizer:
            return []
        if row.verdict is Verdict.OVERFLOW:
            return self._overflow(row)
        if not row.applied:
            return []
        self._skipped, self._streak_told = 0, False
        self._landed += 1
        if self._landed <= STRETCH:
            self._usual = row.loss_scale
        elif row.loss_scale >= self._usual / MANIFOLD:
            # A slow fall is followed, a fast one is told.
            self._usual = max(row.loss_scale, (1 - NOTHING) * self._usual)
            self._by_skips = 0
        low = row.loss_scale < self._usual / self._sight.scale_falls
        if not low:
            self._low_told = False
            return []
        if self._low_told:
            return []
        self._low_told = True
        detail = f"the loss scale is {row.loss_scale:.3g} and was {self._usual:.3g}: small gradients become zero"
        return self.found(
            row,
            detail,
            Pattern.OVERFLOW_SKIPS if self._by_skips else Pattern.NONE,
            severe=True,
            scale=row.loss_scale,
            usual=self._usual,
            skipped=self._by_skips,
        )

    def _overflow(self, row: StepMetrics) -> list[Finding]:
        self._skipped += 1
        self._by_skips += 1
        if self._landed < STRETCH or self._skipped < self._sight.streak or self._streak_told:
            return []
        self._streak_told = True
        detail = f"{self._skipped} overflows in a row; the loss scale has fallen to {row.loss_scale:.3g}"
        return self.found(row, detail, Pattern.OVERFLOW_SKIPS, scale=row.loss_scale, skipped=self._skipped)
