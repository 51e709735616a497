"""The loss scale of float16: a streak of overflows, or a scale so low that small gradients become zero."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from surefoot.judge.detectors.base import Detector
from surefoot.judge.thresholds import NEGLIGIBLE_FRACTION, STRONG_RATIO, TREND_ROWS, Thresholds
from surefoot.records import Finding, Pattern, StepMetrics, Verdict


class LossScale(Detector):
    """Reports overflow streaks, and (severe) a loss scale far below its usual value."""

    name: ClassVar = "loss_scale"
    state_names: ClassVar = ("_usual", "_applied", "_skipped", "_streak_reported", "_low_reported", "_by_skips")

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._usual = math.nan
        self._applied = 0
        """Updates applied so far."""
        self._skipped = 0
        """Overflows in a row."""
        self._streak_reported = False
        self._low_reported = False
        self._by_skips = 0
        """Overflows since the scale last was about its usual value."""

    def rewound(self) -> None:
        self._skipped, self._by_skips, self._streak_reported, self._low_reported = 0, 0, False, False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        if math.isnan(row.loss_scale) or row.optimizer:
            return []
        if row.verdict is Verdict.OVERFLOW:
            return self._overflow(row)
        if not row.applied:
            return []
        self._skipped, self._streak_reported = 0, False
        self._applied += 1
        if self._applied <= TREND_ROWS:
            self._usual = row.loss_scale
        elif row.loss_scale >= self._usual / STRONG_RATIO:
            # The usual scale follows a slow fall; a fast one is reported.
            self._usual = max(row.loss_scale, (1 - NEGLIGIBLE_FRACTION) * self._usual)
            self._by_skips = 0
        if not row.loss_scale < self._usual / self._thresholds.loss_scale_drop_ratio:
            self._low_reported = False
            return []
        if self._low_reported:
            return []
        self._low_reported = True
        detail = f"the loss scale fell from {self._usual:.3g} to {row.loss_scale:.3g}: small gradients become zero"
        return self.report(
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
        too_few = self._applied < TREND_ROWS or self._skipped < self._thresholds.overflow_streak
        if too_few or self._streak_reported:
            return []
        self._streak_reported = True
        detail = f"{self._skipped} overflows in a row; the loss scale has fallen to {row.loss_scale:.3g}"
        return self.report(row, detail, Pattern.OVERFLOW_SKIPS, scale=row.loss_scale, skipped=self._skipped)
