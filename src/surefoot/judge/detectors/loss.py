"""The loss and the global gradient norm over time: jumps, a higher level, growth, swings, spikes, plateaus."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from surefoot.judge.baselines import Baselines
from surefoot.judge.detectors.base import Detector
from surefoot.judge.detectors.gradients import LossRescaled
from surefoot.judge.loss_shape import shape
from surefoot.judge.thresholds import (
    BASELINE_ROWS,
    EARLY_UPDATES,
    NEGLIGIBLE_FRACTION,
    REPEAT_COUNT,
    SMALL_FRACTION,
    TREND_ROWS,
    WINDOW_ROWS,
)
from surefoot.records import Finding, Pattern, StepMetrics, Verdict

GROWTH_STEPS = 2 * REPEAT_COUNT
"""Steps in a row that must each be larger than the one before to be called growth."""


class Jump(Detector):
    """Reports the first step of each jump of the loss or the gradient norm; severe when huge, or when it repeats."""

    name: ClassVar = "jump"
    state_names: ClassVar = ("_last_attempt", "_quiet_rows", "_jumps")

    def __init__(self, baselines: Baselines) -> None:
        self._baselines = baselines
        self._last_attempt = -BASELINE_ROWS - 1
        """The attempt of the last large norm jump."""
        self._quiet_rows = REPEAT_COUNT
        self._jumps = 0
        """Large norm jumps, each within 64 rows of the one before."""

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        baselines, thresholds = self._baselines, self._baselines.thresholds
        if row.verdict not in (Verdict.APPLIED, Verdict.NORM_OUTLIER) or not baselines.ready:
            return []
        if not baselines.is_spike(row):
            self._quiet_rows += 1
            return []
        begins, self._quiet_rows = self._quiet_rows >= REPEAT_COUNT, 0
        if not begins:
            return []
        log_ratio, z = baselines.log_norm_ratio(row), baselines.z(row.loss)
        large = log_ratio > math.log(thresholds.large_norm_jump_ratio)
        huge = log_ratio > math.log(thresholds.huge_norm_jump_ratio)
        if large:  # a second one within 64 rows says that the first was no accident
            self._jumps = self._jumps + 1 if row.attempt - self._last_attempt <= BASELINE_ROWS else 1
            self._last_attempt = row.attempt
        loss_jumps = z > thresholds.loss_jump_sigmas
        parts = [f"the loss is {row.loss:.4g}, {z:.3g} sigmas above normal"] if loss_jumps else []
        if log_ratio > math.log(thresholds.norm_jump_ratio):
            parts.append(f"the gradient norm is {math.exp(min(log_ratio, 700.0)):.3g} times the recent maximum")
        return self.report(
            row,
            " and ".join(parts),
            Pattern.JUMP,
            severe=row.applied and ((large and self._jumps > 1) or (huge and loss_jumps)),
            loss=row.loss,
            norm=row.norm,
            deviations=z,
            norm_ratio=log_ratio,
            huge=huge and row.applied,
            times=self._jumps,
        )


class LossLevel(Detector):
    """Reports a loss that has risen and stays there, and again (severe) when the run has lost what it had learnt."""

    name: ClassVar = "loss_level"
    state_names: ClassVar = ("_reported", "_severe", "_losses", "_lowest", "_slow_reported")

    def __init__(self, baselines: Baselines, loss_rescaled: LossRescaled) -> None:
        self._baselines = baselines
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

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        baselines = self._baselines
        recent = [loss for loss in baselines.recent_losses if math.isfinite(loss)]
        if row.optimizer or not baselines.ready or len(recent) < baselines.thresholds.lasting_steps:
            return []
        slow = [] if baselines.adversarial else self._slow_rise(row)
        return [*self._sudden_rise(row, recent), *slow]

    def _slow_rise(self, row: StepMetrics) -> list[Finding]:
        """Compares the mean of every 32 losses with the lowest such mean."""
        if row.applied and math.isfinite(row.loss):
            self._losses.append(row.loss)
        if len(self._losses) < TREND_ROWS:
            return []
        kept = sorted(self._losses)[TREND_ROWS // 8 : -TREND_ROWS // 8]  # without outliers
        self._losses = []
        mean = _mean(kept)
        error = math.sqrt(sum((x - mean) ** 2 for x in kept)) / len(kept)
        lowest, sigmas = self._lowest, math.inf
        if not lowest or mean < lowest[0]:
            self._lowest = [mean, error]
        if lowest:
            sigmas = (mean - lowest[0]) / max(math.hypot(error, lowest[1]), 1e-30)
        # A fraction of a negative loss (a policy gradient's, say) means nothing: its zero is arbitrary.
        thresholds = self._baselines.thresholds
        min_rise = thresholds.slow_rise_fraction * lowest[0] if lowest else math.nan
        risen = bool(lowest) and sigmas > thresholds.level_sigmas and mean - lowest[0] > min_rise > 0
        if not risen or self._slow_reported or self._reported:
            self._slow_reported = risen
            return []
        self._slow_reported = True
        detail = f"the loss has risen slowly: its mean over {TREND_ROWS} steps went from {lowest[0]:.4g} to {mean:.4g}"
        start = self._baselines.start_loss
        return self.report(
            row,
            detail,
            level=mean,
            normal=lowest[0],
            deviations=sigmas,
            of_start=mean / start if start else math.nan,
            slowly=True,
        )

    def _sudden_rise(self, row: StepMetrics, recent: list[float]) -> list[Finding]:
        baselines, thresholds = self._baselines, self._baselines.thresholds
        last = sorted(recent[-thresholds.lasting_steps :])
        level = last[len(last) // 2]
        z = baselines.z(level)
        mean_z = baselines.z(_mean(recent)) if len(recent) == WINDOW_ROWS and not baselines.adversarial else 0.0
        if z < baselines.level_sigmas and mean_z < thresholds.mean_level_sigmas:
            self._reported &= z > thresholds.level_sigmas / 2 or mean_z > thresholds.mean_level_sigmas / 2
            self._severe &= self._reported
            return []
        lost = self._lost_everything(row, level, z, lowest=last[0])
        if self._reported and (self._severe or not lost):
            return []
        self._reported, self._severe = True, self._severe or lost
        sudden = z >= thresholds.level_sigmas
        shown, sigmas = (level, z) if sudden else (_mean(recent), max(z, mean_z))
        start, normal = baselines.start_loss, baselines.loss.median
        compared = f"{shown / start:.3g} times its start value" if lost else f"{sigmas:.3g} sigmas"
        return self.report(
            row,
            f"the loss has risen from {normal:.4g} to {shown:.4g} and stays there ({compared})",
            Pattern.JUMP if z > thresholds.loss_jump_sigmas else Pattern.NONE,
            severe=lost,
            level=shown,
            normal=normal,
            deviations=sigmas,
            of_start=shown / start if start else math.nan,
        )

    def _lost_everything(self, row: StepMetrics, level: float, z: float, *, lowest: float) -> bool:
        """The level is twice what the run began with, and each of the last losses says so: under a heavy tail some of
        them are as low as ever."""
        baselines, thresholds = self._baselines, self._baselines.thresholds
        start = baselines.start_loss
        rescaled_level = level / self._loss_rescaled.recent_factor
        return (
            not baselines.adversarial
            and start > 0  # else a multiple of it means nothing
            and z > thresholds.loss_jump_sigmas
            and rescaled_level > thresholds.lost_level_ratio * max(start, baselines.loss.max) > 0
            and row.applied
            and baselines.z(lowest) > thresholds.level_sigmas
        )


class Growth(Detector):
    """Reports exponential growth: a loss or norm that is larger at every step."""

    name: ClassVar = "growth"
    state_names: ClassVar = ("_losses", "_norms", "_reported")

    def __init__(self, baselines: Baselines) -> None:
        self._baselines = baselines
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._reported = False

    def rewound(self) -> None:
        self._losses, self._norms, self._reported = [], [], False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        if row.optimizer or not row.applied:
            return []
        self._losses = [*self._losses, row.loss][-GROWTH_STEPS - 1 :]
        self._norms = [*self._norms, row.norm][-GROWTH_STEPS - 1 :]
        loss_growth, norm_growth = _growth(self._losses), _growth(self._norms)
        if loss_growth == norm_growth == 0.0:
            self._reported = False
            return []
        by_loss = loss_growth >= norm_growth
        what, growth = ("loss", loss_growth) if by_loss else ("gradient norm", norm_growth)
        min_sigmas = self._baselines.thresholds.level_sigmas
        above = self._baselines.norm_z(row) > min_sigmas or self._baselines.z(row.loss) > min_sigmas
        if growth < self._baselines.thresholds.growth_ratio or not above:
            self._reported = self._reported and growth > 1.0
            return []
        if self._reported:
            return []
        self._reported = True
        detail = f"the {what} has grown at each of the last {GROWTH_STEPS} steps, {growth:.3g} times in all"
        return self.report(row, detail, Pattern.EXPONENTIAL, rise=growth, of=what, loss=row.loss, norm=row.norm)


def _growth(values: Sequence[float]) -> float:
    """The last value over the first, if the values grew at every step; else 0."""
    if len(values) <= GROWTH_STEPS or not values[-1] > values[-2]:
        return 0.0
    grows = all(0.0 < a < b < math.inf for a, b in itertools.pairwise(values))
    return values[-1] / values[0] if grows else 0.0


class Oscillation(Detector):
    """Reports a loss that swings up and down, wider and wider."""

    name: ClassVar = "oscillation"
    state_names: ClassVar = ("_reported",)

    def __init__(self, baselines: Baselines) -> None:
        self._baselines = baselines
        self._reported = False

    def rewound(self) -> None:
        self._reported = False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        baselines = self._baselines
        if row.optimizer or not baselines.ready or not math.isfinite(row.loss):
            return []
        z = baselines.z(row.loss)
        high = z > baselines.thresholds.loss_jump_sigmas
        swings = (self._reported or high) and shape(list(baselines.recent_losses)) is Pattern.OSCILLATING
        if self._reported or not swings or not high:
            self._reported = self._reported and (swings or z > 1.0)  # between two swings the loss is low for a step
            return []
        self._reported = True
        detail = f"the loss swings wider and wider, and has reached {row.loss:.4g}"
        return self.report(row, detail, Pattern.OSCILLATING, loss=row.loss, deviations=z)


class PeriodicSpikes(Detector):
    """Reports refused or spiking steps that come back at equal distances: every epoch, every shard."""

    name: ClassVar = "periodic_spikes"
    state_names: ClassVar = ("_attempts", "_last_attempt", "_reported")

    def __init__(self, baselines: Baselines) -> None:
        self._baselines = baselines
        self._attempts: list[int] = []
        """Attempts at which the last spikes began."""
        self._last_attempt = -BASELINE_ROWS
        self._reported = False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        refused = row.verdict in (Verdict.NONFINITE, Verdict.NORM_OUTLIER)
        if not (refused or (row.applied and self._baselines.is_spike(row))) or row.optimizer:
            return []
        previous, self._last_attempt = self._last_attempt, row.attempt
        if row.attempt - previous <= REPEAT_COUNT:
            return []  # still the same spike
        count = self._baselines.thresholds.periodic_spike_count
        self._attempts = [*self._attempts, row.attempt][-1 - count :]
        gaps = [b - a for a, b in itertools.pairwise(self._attempts)]
        if len(gaps) < count or max(gaps) - min(gaps) > 1:
            self._reported = False
            return []
        if self._reported:
            return []
        self._reported = True
        return self.report(row, f"spikes or refused updates come back every {gaps[-1]} steps", period=gaps[-1])


class Plateau(Detector):
    """Reports a loss that does not go down, or that falls as if the same data came again and again."""

    name: ClassVar = "plateau"
    state_names: ClassVar = ("_reported", "_fall_reported", "_best", "_rows_since_best")

    def __init__(self, baselines: Baselines) -> None:
        self._baselines = baselines
        self._reported = False
        self._fall_reported = False
        self._best = math.inf
        self._rows_since_best = 0

    def rewound(self) -> None:
        self._rows_since_best = 0

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        baselines = self._baselines
        recent = [loss for loss in baselines.recent_losses if math.isfinite(loss)]
        too_few = not baselines.ready or len(recent) < WINDOW_ROWS
        if row.optimizer or not row.applied or too_few or baselines.adversarial:
            return []
        mean = sum(recent) / len(recent)
        return [*self._flat(row, mean), *self._falling(row, mean, max(recent))]

    def _flat(self, row: StepMetrics, mean: float) -> list[Finding]:
        start = self._baselines.start_loss
        if mean < self._best - NEGLIGIBLE_FRACTION * abs(self._best) or math.isinf(self._best):
            self._best, self._rows_since_best = mean, 0
        self._rows_since_best += 1
        gained = (start - mean) / abs(start) if start else 1.0
        if self._reported or self._rows_since_best < EARLY_UPDATES or gained > SMALL_FRACTION:
            self._reported = self._reported and gained <= SMALL_FRACTION
            return []
        self._reported = True
        detail = (
            f"the loss is {mean:.4g} and began at {start:.4g}; it has not improved for {self._rows_since_best} steps"
        )
        return self.report(row, detail, Pattern.PLATEAU, level=mean, start=start)

    def _falling(self, row: StepMetrics, mean: float, max_recent: float) -> list[Finding]:
        """Even the worst of the last losses is below the best of those before."""
        baselines, min_sigmas = self._baselines, self._baselines.thresholds.level_sigmas
        sigmas_below = (baselines.loss.median - mean) / baselines.loss.sigma
        below_all = max_recent < baselines.loss.quantile(0.0)
        if not (sigmas_below > min_sigmas and below_all and baselines.applied_updates > EARLY_UPDATES):
            self._fall_reported = self._fall_reported and sigmas_below > min_sigmas / 2
            return []
        if self._fall_reported:
            return []
        self._fall_reported = True
        normal = baselines.loss.median
        detail = f"the loss has suddenly fallen from {normal:.4g} to {mean:.4g}, {sigmas_below:.3g} sigmas"
        return self.report(row, detail, Pattern.OVERFIT, level=mean, normal=normal)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
