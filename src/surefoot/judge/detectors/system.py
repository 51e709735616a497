"""The machine: the loss scale of float16, memory, and utilisation; only the first is the same on every rank."""

from __future__ import annotations

import itertools
import math
from typing import ClassVar

import numpy as np

from surefoot.judge.detectors.base import NOTHING, Detector, Findings
from surefoot.judge.evidence import ScaleFell, TimeEvidence
from surefoot.judge.signals import Sign
from surefoot.judge.thresholds import (
    BASELINE_ROWS,
    NEGLIGIBLE_FRACTION,
    NOTABLE_FRACTION,
    SMALL_FRACTION,
    STRONG_RATIO,
    TREND_ROWS,
    WINDOW_ROWS,
    Thresholds,
)
from surefoot.records import FindingKind, Pattern, Severity, StepMetrics, Verdict

OVERFLOW_STREAK = WINDOW_ROWS // 2
"""Overflows in a row that are reported."""


class MemoryGrowth(Detector):
    """Reports memory that grows from reading to reading and is hardly ever given back."""

    kind: ClassVar = FindingKind.MEMORY_GROWTH
    severity: ClassVar = Severity.REPORT_ONLY
    wakes_on: ClassVar = Sign.MEMORY
    state_names: ClassVar = ("_readings", "_last", "_reported")

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._readings: list[float] = []
        self._last = math.nan
        self._reported = False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> Findings:
        if row.step < BASELINE_ROWS or not row.memory > 0 or row.memory == self._last:
            return NOTHING
        self._last = row.memory
        self._readings = [*self._readings, row.memory][-4 * WINDOW_ROWS :]
        if self._reported or len(self._readings) < WINDOW_ROWS:
            return NOTHING
        tail = self._readings[-WINDOW_ROWS:]
        changes = [b - a for a, b in itertools.pairwise(tail)]
        rises = sum(change > 0 for change in changes)
        risen = sum(change for change in changes if change > 0)
        fallen = -sum(change for change in changes if change < 0)
        growth = tail[-1] / self._readings[0]
        given_back = fallen > NOTABLE_FRACTION * risen  # as a garbage collector does
        if rises < WINDOW_ROWS - 2 or given_back or growth < 1 + SMALL_FRACTION / 2:
            return NOTHING
        self._reported = True
        detail = f"memory has grown steadily from {self._readings[0] / 1e6:.4g} to {tail[-1] / 1e6:.4g} MB"
        return self.report(row, detail, {"memory": row.memory, "grown": growth})


class IdleDevice(Detector):
    """Reports a device whose utilisation stays low, and whether it waits for data or for kernel launches."""

    kind: ClassVar = FindingKind.IDLE_DEVICE
    severity: ClassVar = Severity.REPORT_ONLY
    wakes_on: ClassVar = Sign.UTILISATION
    state_names: ClassVar = ("_low", "_since", "_wait", "_reported")

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._low = 0
        """Readings with low utilisation in a row, and the time of the first."""
        self._since: float | None = None
        self._wait = 0.0
        """Mean fraction of a step spent waiting for data since then."""
        self._reported = False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> Findings:
        if math.isnan(row.utilisation):
            return NOTHING
        if row.utilisation >= self._thresholds.idle_utilisation:
            self._low, self._since, self._wait, self._reported = 0, None, 0.0, False
            return NOTHING
        self._since = row.time if self._since is None else self._since
        self._low += 1
        fraction = row.data_wait / row.seconds if row.seconds > 0 and not math.isnan(row.data_wait) else 0.0
        self._wait += (fraction - self._wait) / self._low
        seconds = row.time - self._since
        if seconds < self._thresholds.idle_seconds or self._reported:
            return NOTHING
        data = STRONG_RATIO * self._wait > 1
        if not data and math.isnan(row.memory_reserved):  # a CPU: training on fewer threads than cores is no fault
            return NOTHING
        self._reported = True
        reason = (
            f"steps spend {self._wait:.0%} of their time waiting for data"
            if data
            else "steps do not wait for data, so it waits for kernel launches"
        )
        limit = self._thresholds.idle_utilisation
        detail = f"the device has been below {limit:.0%} utilisation for {seconds:.0f} s: {reason}"
        bottleneck = "" if data else "launches"
        evidence = TimeEvidence(
            data=data, bottleneck=bottleneck, utilisation=row.utilisation, data_wait_share=self._wait
        )
        return self.report(row, detail, evidence)


class LossScale(Detector):
    """Reports overflow streaks, and (severe) a loss scale far below its usual value."""

    kind: ClassVar = FindingKind.LOSS_SCALE
    wakes_on: ClassVar = Sign.LOSS_SCALE
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

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> Findings:
        if math.isnan(row.loss_scale) or row.optimizer:
            return NOTHING
        if row.verdict is Verdict.OVERFLOW:
            return self._overflow(row)
        if not row.applied:
            return NOTHING
        self._skipped, self._streak_reported = 0, False
        self._applied += 1
        if self._applied <= TREND_ROWS:
            self._usual = row.loss_scale
        elif row.loss_scale >= self._usual / STRONG_RATIO:
            # The usual scale follows a slow fall; a fast one is reported.
            self._usual = max(row.loss_scale, (1 - NEGLIGIBLE_FRACTION) * self._usual)
            self._by_skips = 0
        if not row.loss_scale < self._usual / STRONG_RATIO**3:
            self._low_reported = False
            return NOTHING
        if self._low_reported:
            return NOTHING
        self._low_reported = True
        detail = f"the loss scale fell from {self._usual:.3g} to {row.loss_scale:.3g}: small gradients become zero"
        evidence = ScaleFell(scale=row.loss_scale, usual=self._usual, skipped=self._by_skips)
        pattern = Pattern.OVERFLOW_SKIPS if self._by_skips else Pattern.NONE
        return self.report(row, detail, evidence, pattern, severe=True)

    def _overflow(self, row: StepMetrics) -> Findings:
        self._skipped += 1
        self._by_skips += 1
        too_few = self._applied < TREND_ROWS or self._skipped < OVERFLOW_STREAK
        if too_few or self._streak_reported:
            return NOTHING
        self._streak_reported = True
        detail = f"{self._skipped} overflows in a row; the loss scale has fallen to {row.loss_scale:.3g}"
        return self.report(row, detail, {"scale": row.loss_scale, "skipped": self._skipped}, Pattern.OVERFLOW_SKIPS)
