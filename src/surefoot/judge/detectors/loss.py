"""The loss and the global gradient norm over time: jumps, a higher level, growth, swings, spikes, plateaus."""

from __future__ import annotations

import itertools
import math
from typing import ClassVar

import numpy as np

from surefoot.judge.detectors.base import NOTHING, Detector, Findings, WatchingDetector
from surefoot.judge.detectors.gradients import LossRescaled
from surefoot.judge.evidence import GrowthEvidence, JumpEvidence, LevelEvidence, SwingEvidence
from surefoot.judge.loss_shape import shape
from surefoot.judge.signals import Sign, Signals
from surefoot.judge.thresholds import (
    BASELINE_ROWS,
    DOUBLE_RATIO,
    EARLY_UPDATES,
    NEGLIGIBLE_FRACTION,
    RECENT_ROWS,
    REPEAT_COUNT,
    SMALL_FRACTION,
    TREND_ROWS,
    TRIPLE_RATIO,
    WINDOW_ROWS,
)
from surefoot.records import FindingKind, Pattern, Severity, StepMetrics, Verdict

GROWTH_STEPS = 2 * REPEAT_COUNT
"""Steps in a row that must each be larger than the one before to be called growth."""


class Jump(WatchingDetector):
    """Reports the first step of each jump of the loss or the gradient norm; severe when huge, or when it repeats."""

    kind: ClassVar = FindingKind.JUMP
    wakes_on: ClassVar = Sign.SPIKE
    state_names: ClassVar = ("_last_attempt", "_quiet_rows", "_jumps")

    def __init__(self, signals: Signals) -> None:
        super().__init__()
        self._signals = signals
        self._last_attempt = -BASELINE_ROWS - 1
        """The attempt of the last large norm jump."""
        self._quiet_rows = REPEAT_COUNT
        """Rows since the last spike, as far as they matter."""
        self._jumps = 0
        """Large norm jumps, each within 64 rows of the one before."""

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> Findings:
        signals, thresholds = self._signals, self._signals.thresholds
        if row.verdict not in (Verdict.APPLIED, Verdict.NORM_OUTLIER) or not signals.ready:
            return NOTHING
        if not signals.is_spike:
            self._quiet_rows = min(self._quiet_rows + 1, REPEAT_COUNT)
            self.watching = self._quiet_rows < REPEAT_COUNT
            return NOTHING
        begins, self._quiet_rows, self.watching = self._quiet_rows >= REPEAT_COUNT, 0, True
        if not begins:
            return NOTHING
        log_ratio, z = signals.log_norm_ratio, signals.z
        large = log_ratio > math.log(thresholds.large_norm_jump_ratio)
        huge = log_ratio > math.log(thresholds.huge_norm_jump_ratio)
        if large:  # a second one within 64 rows says that the first was no accident
            self._jumps = self._jumps + 1 if row.attempt - self._last_attempt <= BASELINE_ROWS else 1
            self._last_attempt = row.attempt
        loss_jumps = z > thresholds.loss_jump_sigmas
        parts = [f"the loss is {row.loss:.4g}, {z:.3g} sigmas above normal"] if loss_jumps else []
        if log_ratio > math.log(thresholds.norm_jump_ratio):
            parts.append(f"the gradient norm is {math.exp(min(log_ratio, 700.0)):.3g} times the recent maximum")
        evidence = JumpEvidence(
            loss=row.loss,
            norm=row.norm,
            deviations=z,
            norm_ratio=log_ratio,
            huge=huge and row.applied,
            times=self._jumps,
        )
        severe = row.applied and ((large and self._jumps > 1) or (huge and loss_jumps))
        return self.report(row, " and ".join(parts), evidence, Pattern.JUMP, severe=severe)


class LossLevel(Detector):
    """Reports a loss that has risen and stays there, and again (severe) when the run has lost what it had learnt."""

    kind: ClassVar = FindingKind.LOSS_LEVEL
    wakes_on: ClassVar = Sign.FIRST
    state_names: ClassVar = ("_reported", "_severe", "_losses", "_lowest", "_slow_reported")

    def __init__(self, signals: Signals, loss_rescaled: LossRescaled) -> None:
        self._signals = signals
        self._loss_rescaled = loss_rescaled
        self._reported = False
        self._severe = False
        self._losses: list[float] = []
        self._lowest: list[float] = []
        """Mean and standard error of the lowest 32 losses in a row so far."""
        self._slow_reported = False

    def rewound(self) -> None:
        self._reported = self._severe = False
        self._losses = []

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> Findings:
        signals, thresholds = self._signals, self._signals.thresholds
        if row.optimizer or not signals.ready or len(signals.recent) < RECENT_ROWS:
            return NOTHING
        slow = NOTHING
        if not signals.adversarial:
            if row.applied and math.isfinite(row.loss):
                self._losses.append(row.loss)
            slow = self._slow_rise(row) if len(self._losses) >= TREND_ROWS else NOTHING
        last = sorted(signals.recent[-RECENT_ROWS:])
        level = last[len(last) // 2]
        z, mean_z = (level - signals.loss.median) / signals.scale, 0.0
        if len(signals.recent) == WINDOW_ROWS and not signals.adversarial:
            mean_z = (signals.recent_mean - signals.loss.median) / signals.scale
        if z < signals.level_sigmas and mean_z < thresholds.mean_level_sigmas:
            if self._reported:
                self._reported = z > thresholds.level_sigmas / 2 or mean_z > thresholds.mean_level_sigmas / 2
                self._severe &= self._reported
            return slow
        return [*self._sudden_rise(row, level, z, mean_z, lowest=last[0]), *slow]

    def _slow_rise(self, row: StepMetrics) -> Findings:
        """Compares the mean of every 32 losses with the lowest such mean."""
        kept = sorted(self._losses)[TREND_ROWS // 8 : -TREND_ROWS // 8]  # without outliers
        self._losses = []
        mean = sum(kept) / len(kept)
        error = math.sqrt(sum((x - mean) ** 2 for x in kept)) / len(kept)
        lowest, sigmas = self._lowest, math.inf
        if not lowest or mean < lowest[0]:
            self._lowest = [mean, error]
        if lowest:
            sigmas = (mean - lowest[0]) / max(math.hypot(error, lowest[1]), 1e-30)
        # A fraction of a negative loss (a policy gradient's, say) means nothing: its zero is arbitrary.
        thresholds, start = self._signals.thresholds, self._signals.start_loss
        min_rise = thresholds.slow_rise_fraction * lowest[0] if lowest else math.nan
        risen = bool(lowest) and sigmas > thresholds.level_sigmas and mean - lowest[0] > min_rise > 0
        if not risen or self._slow_reported or self._reported:
            self._slow_reported = risen
            return NOTHING
        self._slow_reported = True
        detail = f"the loss has risen slowly: its mean over {TREND_ROWS} steps went from {lowest[0]:.4g} to {mean:.4g}"
        of_start = mean / start if start else math.nan
        evidence = LevelEvidence(level=mean, normal=lowest[0], deviations=sigmas, of_start=of_start, slowly=True)
        return self.report(row, detail, evidence)

    def _sudden_rise(self, row: StepMetrics, level: float, z: float, mean_z: float, *, lowest: float) -> Findings:
        signals, thresholds = self._signals, self._signals.thresholds
        lost = self._lost_everything(row, level, z, lowest=lowest)
        if self._reported and (self._severe or not lost):
            return NOTHING
        self._reported, self._severe = True, self._severe or lost
        sudden = z >= thresholds.level_sigmas
        shown, sigmas = (level, z) if sudden else (signals.recent_mean, max(z, mean_z))
        start, normal = signals.start_loss, signals.loss.median
        compared = f"{shown / start:.3g} times its start value" if lost else f"{sigmas:.3g} sigmas"
        detail = f"the loss has risen from {normal:.4g} to {shown:.4g} and stays there ({compared})"
        of_start = shown / start if start else math.nan
        evidence = LevelEvidence(level=shown, normal=normal, deviations=sigmas, of_start=of_start)
        pattern = Pattern.JUMP if z > thresholds.loss_jump_sigmas else Pattern.NONE
        return self.report(row, detail, evidence, pattern, severe=lost)

    def _lost_everything(self, row: StepMetrics, level: float, z: float, *, lowest: float) -> bool:
        """The level is twice what the run began with, and each of the last losses says so: under a heavy tail some of
        them are as low as ever."""
        signals, thresholds = self._signals, self._signals.thresholds
        start = signals.start_loss
        rescaled_level = level / self._loss_rescaled.recent_factor
        return (
            not signals.adversarial
            and start > 0  # else a multiple of it means nothing
            and z > thresholds.loss_jump_sigmas
            and rescaled_level > DOUBLE_RATIO * max(start, signals.loss.max) > 0
            and row.applied
            and signals.sigmas(lowest) > thresholds.level_sigmas
        )


class Growth(Detector):
    """Reports exponential growth: a loss or norm that is larger at every step."""

    kind: ClassVar = FindingKind.GROWTH
    wakes_on: ClassVar = Sign.UPDATE
    state_names: ClassVar = ("_losses", "_norms", "_reported")

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._reported = False

    def rewound(self) -> None:
        self._losses, self._norms, self._reported = [], [], False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> Findings:
        if row.optimizer or not row.applied:
            return NOTHING
        losses, norms = self._losses, self._norms
        losses.append(row.loss)
        norms.append(row.norm)
        if len(losses) > GROWTH_STEPS + 1:
            del losses[0], norms[0]
        if len(losses) <= GROWTH_STEPS or not (losses[-1] > losses[-2] or norms[-1] > norms[-2]):
            self._reported = False
            return NOTHING
        loss_growth, norm_growth = _growth(losses), _growth(norms)
        if loss_growth == norm_growth == 0.0:
            self._reported = False
            return NOTHING
        by_loss = loss_growth >= norm_growth
        what, growth = ("loss", loss_growth) if by_loss else ("gradient norm", norm_growth)
        thresholds = self._signals.thresholds
        min_sigmas = thresholds.level_sigmas
        above = self._signals.norm_sigmas(row) > min_sigmas or self._signals.z > min_sigmas
        if growth < TRIPLE_RATIO or not above:
            self._reported = self._reported and growth > 1.0
            return NOTHING
        if self._reported:
            return NOTHING
        self._reported = True
        detail = f"the {what} has grown at each of the last {GROWTH_STEPS} steps, {growth:.3g} times in all"
        evidence = GrowthEvidence(rise=growth, of=what, loss=row.loss, norm=row.norm)
        return self.report(row, detail, evidence, Pattern.EXPONENTIAL)


def _growth(values: list[float]) -> float:
    """The last value over the first, if the values grew at every step; else 0."""
    later = math.inf
    for value in reversed(values):
        if not 0.0 < value < later:
            return 0.0
        later = value
    return values[-1] / values[0]


class Oscillation(WatchingDetector):
    """Reports a loss that swings up and down, wider and wider."""

    kind: ClassVar = FindingKind.OSCILLATION
    wakes_on: ClassVar = Sign.HIGH_LOSS
    state_names: ClassVar = ("_reported",)

    def __init__(self, signals: Signals) -> None:
        super().__init__()
        self._signals = signals
        self._reported = False

    def rewound(self) -> None:
        self._reported = False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> Findings:
        signals = self._signals
        if row.optimizer or not signals.ready or not math.isfinite(row.loss):
            return NOTHING
        high = signals.z > signals.thresholds.loss_jump_sigmas
        swings = (self._reported or high) and shape(list(signals.recent_losses)) is Pattern.OSCILLATING
        if self._reported or not swings or not high:
            # between two swings the loss is low for a step
            self._reported = self.watching = self._reported and (swings or signals.z > 1.0)
            return NOTHING
        self._reported = self.watching = True
        detail = f"the loss swings wider and wider, and has reached {row.loss:.4g}"
        return self.report(row, detail, SwingEvidence(loss=row.loss, deviations=signals.z), Pattern.OSCILLATING)


class PeriodicSpikes(Detector):
    """Reports refused or spiking steps that come back at equal distances: every epoch, every shard."""

    kind: ClassVar = FindingKind.PERIODIC_SPIKES
    severity: ClassVar = Severity.REPORT_ONLY
    wakes_on: ClassVar = Sign.REFUSED | Sign.SPIKE
    state_names: ClassVar = ("_attempts", "_last_attempt", "_reported")

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._attempts: list[int] = []
        """Attempts at which the last spikes began."""
        self._last_attempt = -BASELINE_ROWS
        self._reported = False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> Findings:
        refused = row.verdict in (Verdict.NONFINITE, Verdict.NORM_OUTLIER)
        if not (refused or (row.applied and self._signals.is_spike)) or row.optimizer:
            return NOTHING
        previous, self._last_attempt = self._last_attempt, row.attempt
        if row.attempt - previous <= REPEAT_COUNT:
            return NOTHING  # still the same spike
        self._attempts = [*self._attempts, row.attempt][-1 - REPEAT_COUNT :]
        gaps = [b - a for a, b in itertools.pairwise(self._attempts)]
        if len(gaps) < REPEAT_COUNT or max(gaps) - min(gaps) > 1:
            self._reported = False
            return NOTHING
        if self._reported:
            return NOTHING
        self._reported = True
        detail = f"spikes or refused updates come back every {gaps[-1]} steps"
        return self.report(row, detail, {"period": gaps[-1]})


class Plateau(Detector):
    """Reports a loss that does not go down, or that falls as if the same data came again and again."""

    kind: ClassVar = FindingKind.PLATEAU
    severity: ClassVar = Severity.REPORT_ONLY
    wakes_on: ClassVar = Sign.UPDATE
    state_names: ClassVar = ("_reported", "_fall_reported", "_best", "_rows_since_best")

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._reported = False
        self._fall_reported = False
        self._best = math.inf
        self._rows_since_best = 0

    def rewound(self) -> None:
        self._rows_since_best = 0

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> Findings:
        signals = self._signals
        too_few = not signals.ready or len(signals.recent) < WINDOW_ROWS
        if row.optimizer or not row.applied or too_few or signals.adversarial:
            return NOTHING
        mean, best = signals.recent_mean, self._best
        if mean < best - NEGLIGIBLE_FRACTION * abs(best) or math.isinf(best):
            self._best, self._rows_since_best = mean, 0
        self._rows_since_best += 1
        findings = NOTHING
        if self._reported or self._rows_since_best >= EARLY_UPDATES:
            findings = self._flat(row, mean)
        sigmas_below = (signals.loss.median - mean) / signals.loss.sigma
        if self._fall_reported or sigmas_below > signals.thresholds.level_sigmas:
            findings = [*findings, *self._falling(row, mean, sigmas_below)]
        return findings

    def _flat(self, row: StepMetrics, mean: float) -> Findings:
        start = self._signals.start_loss
        gained = (start - mean) / abs(start) if start else 1.0
        if self._reported or self._rows_since_best < EARLY_UPDATES or gained > SMALL_FRACTION:
            self._reported = self._reported and gained <= SMALL_FRACTION
            return NOTHING
        self._reported = True
        detail = (
            f"the loss is {mean:.4g} and began at {start:.4g}; it has not improved for {self._rows_since_best} steps"
        )
        return self.report(row, detail, {"level": mean, "start": start}, Pattern.PLATEAU)

    def _falling(self, row: StepMetrics, mean: float, sigmas_below: float) -> Findings:
        """Even the worst of the last losses is below the best of those before."""
        signals, min_sigmas = self._signals, self._signals.thresholds.level_sigmas
        below_all = max(signals.recent) < signals.loss.quantile(0.0)
        if not (sigmas_below > min_sigmas and below_all and signals.applied_updates > EARLY_UPDATES):
            self._fall_reported = self._fall_reported and sigmas_below > min_sigmas / 2
            return NOTHING
        if self._fall_reported:
            return NOTHING
        self._fall_reported = True
        normal = signals.loss.median
        detail = f"the loss has suddenly fallen from {normal:.4g} to {mean:.4g}, {sigmas_below:.3g} sigmas"
        return self.report(row, detail, {"level": mean, "normal": normal}, Pattern.OVERFIT)
