"""The eval loss, where the loop reports it: the one number that is not about the batches just trained on."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from surefoot.judge.detectors.base import NOTHING, Detector, Findings
from surefoot.judge.evidence import EvalRiseEvidence, RegressionEvidence
from surefoot.judge.signals import Sign, Signals
from surefoot.judge.thresholds import CLEAR_RATIO, DOUBLE_RATIO, REPEAT_COUNT, WINDOW_ROWS
from surefoot.records import FindingKind, Pattern, Severity, StepMetrics


class EvalRise(Detector):
    """Reports an eval loss that stays above its best, and whether the training loss still falls (overfitting)."""

    kind: ClassVar = FindingKind.EVAL_RISE
    severity: ClassVar = Severity.REPORT_ONLY
    wakes_on: ClassVar = Sign.EVAL
    state_names: ClassVar = ("_best", "_train_at_best", "_worse", "_reported")

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._best = math.nan
        self._train_at_best = math.nan
        """The training loss at the best evaluation."""
        self._worse = 0
        """Evaluations in a row that were worse than the best one."""
        self._reported = False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> Findings:
        if row.optimizer or math.isnan(row.eval_loss):
            return NOTHING
        signals = self._signals
        train_loss = signals.recent_mean if len(signals.recent) == WINDOW_ROWS else math.nan
        if not row.eval_loss >= self._best:
            self._best, self._train_at_best = row.eval_loss, train_loss
        if row.eval_loss <= self._best + self._signals.thresholds.eval_rise_fraction * abs(self._best):
            self._worse, self._reported = 0, False
            return NOTHING
        self._worse += 1
        if self._worse < REPEAT_COUNT or self._reported:
            return NOTHING
        self._reported = True
        overfits = train_loss < self._train_at_best
        also = "while the training loss keeps falling" if overfits else "and the training loss does not fall either"
        detail = f"the eval loss is {row.eval_loss:.4g} and was {self._best:.4g} at best, {also}"
        evidence = EvalRiseEvidence(eval_loss=row.eval_loss, best=self._best, apart=overfits)
        return self.report(row, detail, evidence, Pattern.OVERFIT if overfits else Pattern.NONE)


class EvalRegression(Detector):
    """Reports an eval loss far above its best: whatever the training batches look like, that is harm.

    It does so when two evaluations in a row are far above the best one and do not recover, when the first bad one is
    twice as far above it, when one is above the very first evaluation, or when one is above the best one after the
    learning rate was raised. The evidence says at which attempt, and at which lr, the run was last healthy.
    """

    kind: ClassVar = FindingKind.EVAL_REGRESSION
    wakes_on: ClassVar = Sign.EVAL
    state_names: ClassVar = (
        "_best",
        "_healthy_attempt",
        "_healthy_lr",
        "_best_samples",
        "_lr_blamed",
        "_worst",
        "_evals_since",
        "_first",
    )

    def __init__(self, signals: Signals, *, single_rank: bool) -> None:
        self._signals = signals
        self._single_rank = single_rank
        """Several ranks may each report another eval loss, or only one of them: then nothing follows from it."""
        self._best = math.nan
        self._healthy_attempt = -1
        """The attempt of the last evaluation that was about as good as the best one."""
        self._healthy_lr = math.inf
        """The learning rate that had led there."""
        self._best_samples = math.nan
        """Batch size at the best evaluation: smaller batches may not get the loss as low."""
        self._lr_blamed = False
        """A raised lr was reported, and the eval loss has not recovered since."""
        self._first = math.nan
        """The very first eval loss: above it, all that was learnt since is lost."""
        self._worst = math.nan
        """The highest eval loss of the current streak far above the best; a lower one means that the run recovers."""
        self._evals_since = 0
        """Evaluations since the last healthy one."""

    def rewound(self) -> None:
        self._worst = math.nan

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> Findings:
        if not self._single_rank or row.optimizer or math.isnan(row.eval_loss):
            return NOTHING
        signals = self._signals
        thresholds = signals.thresholds
        if not row.eval_loss >= self._best:
            self._best, self._best_samples = row.eval_loss, row.samples
        rise, harm = row.eval_loss - self._best, thresholds.eval_harm_fraction * abs(self._best)
        self._evals_since += 1
        if rise <= thresholds.eval_rise_fraction * abs(self._best):
            # The evaluation saw the weights before this row's update, which the lr of the row before has led to.
            self._healthy_attempt, self._healthy_lr = row.attempt, signals.previous_lr
            self._evals_since = 0
            signals.restart_max_lr()
        previous_worst, far = self._worst, rise > harm
        self._worst = max(row.eval_loss, previous_worst) if far else math.nan
        if math.isnan(self._first):
            self._first = row.eval_loss
        lost = row.eval_loss > self._first > self._best + harm
        sudden = self._evals_since == 1 and rise > DOUBLE_RATIO * thresholds.eval_harm_fraction * abs(self._best)
        twice = far and row.eval_loss >= previous_worst
        lr_ratio = signals.max_lr / self._healthy_lr if self._healthy_lr > 0 else 1.0
        lr_raised = self._evals_since > 0 and lr_ratio > thresholds.lr_jump_ratio and not self._lr_blamed
        self._lr_blamed = self._evals_since > 0 and (self._lr_blamed or lr_raised)
        # Schedules restart on purpose; and an eval loss that rises little by little is overfitting, not damage.
        explained = lr_ratio > CLEAR_RATIO or DOUBLE_RATIO * row.samples <= self._best_samples
        gradual = self._evals_since - 1 > REPEAT_COUNT
        if not lr_raised and (not (twice or sudden or lost) or gradual or explained):
            return NOTHING
        losses = sorted(signals.seen_losses)
        evidence = RegressionEvidence(
            raised=lr_raised,
            twice=twice,
            lost=lost,
            eval_loss=row.eval_loss,
            best=self._best,
            well=self._healthy_attempt,
            rate=self._healthy_lr,
            lately=losses[len(losses) // 2] if losses else math.nan,
        )
        return self.report(row, f"the eval loss is {row.eval_loss:.4g} and was {self._best:.4g} at best", evidence)
