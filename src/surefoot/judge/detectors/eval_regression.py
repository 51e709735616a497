"""Held-out data says that the model has got far worse: whatever the batches in training look like, that is harm."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from surefoot.judge.baselines import Baselines
from surefoot.judge.detectors.base import Detector
from surefoot.judge.policy import AGAIN, CLEARLY, DOUBLE, WHILE
from surefoot.records import Finding, StepMetrics


class EvalRegression(Detector):
    """Speaks when two evaluations running are far above the best one and it does not heal, when the first is twice as
    far above it, when one is above the very first, or above the best one and the rate was raised; knows when, and at
    which rate, all was well."""

    name: ClassVar = "astray"
    kept: ClassVar = (
        "_best",
        "_well",
        "_rate",
        "_now",
        "_top",
        "_samples",
        "_blamed",
        "_far",
        "_since",
        "_first",
        "_lately",
    )

    def __init__(self, normal: Baselines, *, alone: bool) -> None:
        self._normal = normal
        self._alone = alone
        """Several processes may each be told of another loss, or one of them alone: then nothing follows from it."""
        self._best = math.nan
        self._well = -1
        """The attempt at which the last evaluation that was about as good as the best one was told."""
        self._rate = math.inf
        """The rate that had led there."""
        self._now = math.inf
        """That of the last row."""
        self._top = 0.0
        """The highest since."""
        self._samples = math.nan
        """In a batch, at the best one: smaller ones may not lead as far down, also from where it was."""
        self._blamed = False
        """It was told already, and has not been well since."""
        self._first = math.nan
        """The first one of all: what is above it has lost all that was learnt since."""
        self._far = math.nan
        """The highest of the evaluations before, if those were far above the best one: what heals is left alone."""
        self._since = 0
        """Evaluations since all was well."""
        self._lately: list[float] = []
        """The last losses in training."""

    def rewound(self) -> None:
        self._far = math.nan
        self._lately.clear()

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        if not self._alone or row.optimizer:
            return []
        # What is evaluated are the weights before this row's update.
        rate, self._now = self._now, self._normal.rate(row)
        self._top = max(self._top, self._now)
        if math.isfinite(row.loss):
            self._lately = [*self._lately[1 - WHILE :], row.loss]
        if math.isnan(row.eval_loss):
            return []
        sight = self._normal.sight
        if not row.eval_loss >= self._best:
            self._best, self._samples = row.eval_loss, row.samples
        above = row.eval_loss - self._best
        self._since += 1
        if above <= sight.worse * abs(self._best):
            self._well, self._rate, self._top, self._since = row.attempt, rate, self._now, 0
        before, far = self._far, above > sight.astray * abs(self._best)
        self._far = max(row.eval_loss, before) if far else math.nan
        if math.isnan(self._first):
            self._first = row.eval_loss
        lost = row.eval_loss > self._first > self._best + sight.astray * abs(self._best)
        soon = self._since == 1 and above > DOUBLE * sight.astray * abs(self._best)
        twice = far and row.eval_loss >= before
        times = self._top / self._rate if self._rate > 0 else 1.0
        raised = self._since > 0 and times > sight.faster and not self._blamed
        self._blamed = self._since > 0 and (self._blamed or raised)
        # Schedules restart on purpose; and what gets worse little by little is overfitting, and no harm.
        explained = times > CLEARLY or DOUBLE * row.samples <= self._samples
        if not raised and (not (twice or soon or lost) or self._since - 1 > AGAIN or explained):
            return []
        detail = f"the loss on held-out data is {row.eval_loss:.4g} and was {self._best:.4g} at best"
        told = {"eval_loss": row.eval_loss, "best": self._best, "well": self._well, "rate": self._rate}
        told["lately"] = sorted(self._lately)[len(self._lately) // 2] if self._lately else math.nan
        return self.found(row, detail, raised=raised, twice=twice, lost=lost, **told)
