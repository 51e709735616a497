"""Learning rate, momentum and gradient clipping: values that changed, or that do not fit the run."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from surefoot.judge.detectors.base import NOTHING, Detector, Findings, WatchingDetector
from surefoot.judge.evidence import ClippingEvidence, LrDropped, LrRaised, MomentumRaised
from surefoot.judge.signals import Sign, Signals
from surefoot.judge.thresholds import (
    DOUBLE_RATIO,
    EARLY_UPDATES,
    FROZEN_RATIO,
    HUGE_RATIO,
    NOTABLE_FRACTION,
    REPEAT_COUNT,
    SETTLED_UPDATES,
    SMALL_FRACTION,
    Thresholds,
)
from surefoot.records import FindingKind, Severity, StepMetrics


class HyperparamChange(WatchingDetector):
    """Reports a learning rate or momentum far from what this run is used to."""

    kind: ClassVar = FindingKind.HYPERPARAM_CHANGE
    wakes_on: ClassVar = Sign.SETTINGS
    state_names: ClassVar = ("_lr", "_momentum", "_high", "_low")

    def __init__(self, signals: Signals) -> None:
        super().__init__()
        self._signals = signals
        self._lr = math.nan
        """Learning rate and momentum of the row before."""
        self._momentum = math.nan
        self._high = False
        """A raised lr was reported, and it is still high; the same for a lowered one."""
        self._low = False

    def rewound(self) -> None:
        self._high = self._high and bool(self._signals.overrides.max_lr)  # capped now, and reported already

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> Findings:
        if row.optimizer:
            return NOTHING
        findings = [*self._lr_raised(row), *self._lr_dropped(row), *self._momentum_raised(row)]
        self._lr, self._momentum = row.lr, row.momentum
        self.watching = self._high or self._low
        return findings

    def _lr_raised(self, row: StepMetrics) -> Findings:
        ratio, max_ratio = self._signals.lr_ratio, self._signals.thresholds.lr_jump_ratio
        cap = self._signals.overrides.max_lr
        lr = row.lr * self._signals.overrides.lasting_lr_factor
        if cap and lr > max_ratio * cap[0]:
            ratio = lr / cap[0]  # the cap keeps the steps below it, but the loop has set it
        if not self._signals.ready or not ratio > max_ratio:
            self._high = self._high and ratio > max_ratio / 2
            return NOTHING
        if self._high:
            return NOTHING
        self._high = True
        detail = f"the learning rate is {row.lr:.3g}, {ratio:.3g} times its usual value"
        detail += f"; it is capped at {cap[0]:.3g}" if cap else ""
        at_once = row.lr / self._lr if self._lr > 0 else math.nan
        return self.report(row, detail, LrRaised(lr=row.lr, times=ratio, at_once=at_once))

    def _lr_dropped(self, row: StepMetrics) -> Findings:
        ratio = self._lr / row.lr if row.lr > 0 else math.inf if row.lr == 0 and self._lr > 0 else math.nan
        if not ratio > self._signals.thresholds.lr_drop_ratio:
            self._low = self._low and not row.lr > self._lr
            return NOTHING
        if self._low:
            return NOTHING
        self._low = True
        signals = self._signals
        level, start = signals.recent_mean if signals.recent else 0.0, signals.first_loss
        early = row.step < EARLY_UPDATES and start > 0 and level > (1 - NOTABLE_FRACTION) * start
        too_high = "; before that it was so high that the run learned nothing" if early else ""
        detail = f"the learning rate fell from {self._lr:.3g} to {row.lr:.3g} in one step{too_high}"
        return self.report(row, detail, LrDropped(lr=row.lr, before=self._lr, early=early), severe=early)

    def _momentum_raised(self, row: StepMetrics) -> Findings:
        before, now = self._momentum, row.momentum
        if not (math.isfinite(before) and math.isfinite(now)) or now <= before:
            return NOTHING
        if now < 1 and (1 - before) / (1 - now) < self._signals.thresholds.lr_jump_ratio:
            return NOTHING
        never = ", which never forgets a gradient" if now >= 1 else ""
        detail = f"momentum was raised from {before:.4g} to {now:.4g}{never}"
        return self.report(row, detail, MomentumRaised(momentum=now, before=before))


class Clipping(Detector):
    """Reports a clip threshold that nearly every update, or none for 1000 updates, exceeds."""

    kind: ClassVar = FindingKind.CLIPPING
    severity: ClassVar = Severity.REPORT_ONLY
    wakes_on: ClassVar = Sign.CLIP
    state_names: ClassVar = ("_updates", "_unclipped", "_max_norm", "_often_reported", "_never_reported")

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._updates = 0
        self._unclipped = 0
        """Updates in a row that were not clipped."""
        self._max_norm = 0.0
        """The largest norm, decaying slowly."""
        self._often_reported = False
        self._never_reported = False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> Findings:
        if math.isnan(row.clip_factor) or row.optimizer or not row.applied:
            return NOTHING
        self._updates += 1
        self._unclipped = self._unclipped + 1 if row.clip_factor >= 1.0 else 0
        self._max_norm = max(row.norm, 0.999 * self._max_norm)
        often = row.clip_fraction > 1 - SMALL_FRACTION
        if self._updates >= 2 * EARLY_UPDATES and often and not self._often_reported:
            self._often_reported = True
            detail = (
                f"{row.clip_fraction:.0%} of the last 100 updates were clipped at {row.clip:.3g}, which acts like a "
                f"lower learning rate. The largest norms are about {self._max_norm:.3g}; start at two to three times "
                "that."
            )
            return self.report(row, detail, {"share": row.clip_fraction, "clip": row.clip, "top": self._max_norm})
        if self._unclipped >= SETTLED_UPDATES and row.clip > HUGE_RATIO * self._max_norm and not self._never_reported:
            self._never_reported = True
            detail = (
                f"no update was clipped in {SETTLED_UPDATES} steps: the threshold of {row.clip:.3g} is far above the "
                f"largest norm of {self._max_norm:.3g} and protects from little."
            )
            return self.report(row, detail, {"share": 0.0, "clip": row.clip, "top": self._max_norm})
        return NOTHING


class ClippingChanged(Detector):
    """Reports a loop whose own clipping was loosened, lost, or became so tight that hardly any gradient is left.

    A loop clips where the norms it applies are all nearly the same, though those of its gradients are not.
    """

    kind: ClassVar = FindingKind.CLIPPING_CHANGED
    wakes_on: ClassVar = Sign.CLIPS
    state_names: ClassVar = ("_rows_beyond", "_reported")

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._rows_beyond = 0
        self._reported = False

    def rewound(self) -> None:
        self._rows_beyond, self._reported = 0, False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> Findings:
        signals = self._signals
        applied, norms = signals.log_applied_norms, signals.log_norms.get(0)
        applied_norm = row.norm if math.isnan(row.applied_norm) else row.applied_norm
        too_few = norms is None or len(applied) < signals.thresholds.min_baseline_rows
        if row.optimizer or too_few or not 0 < applied_norm < math.inf:
            return NOTHING
        ratio = self._ratio(row, math.log(applied_norm))
        if ratio == 1.0:
            self._rows_beyond, self._reported = 0, False
            return NOTHING
        self._rows_beyond += 1
        if self._rows_beyond < REPEAT_COUNT or self._reported:
            return NOTHING
        self._reported = True
        usual = math.exp(applied.median)
        detail = (
            f"the loop's own clipping changed: it used to pass on gradients of norm {usual:.3g}, and now "
            f"{applied_norm:.3g}, {ratio:.3g} times that"
        )
        return self.report(row, detail, ClippingEvidence(usual=usual, handed=applied_norm, times=ratio))

    def _ratio(self, row: StepMetrics, log_applied: float) -> float:
        """The applied norm over the usual one, if the loop's clipping explains the change; else 1."""
        signals = self._signals
        applied, norms = signals.log_applied_norms, signals.log_norms[0]
        ratio = math.exp(log_applied - applied.median)
        # Where clipping sets the norms, they hardly differ from each other.
        clips = applied.sigma < SMALL_FRACTION and applied.median < norms.median - SMALL_FRACTION
        if clips and ratio > DOUBLE_RATIO:
            return ratio
        shrunk = log_applied - math.log(row.norm) - (applied.median - norms.median) if row.norm > 0 else 0.0
        too_tight = shrunk < -math.log(FROZEN_RATIO) and signals.log_norm_ratio <= 0
        return ratio if too_tight else 1.0
