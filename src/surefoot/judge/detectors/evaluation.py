"""The loss on held-out data, where the loop tells it: the one number that is not about the batches just seen."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from surefoot.judge.baselines import Baselines
from surefoot.judge.detectors.base import Detector
from surefoot.judge.policy import AGAIN, WHILE
from surefoot.records import Finding, Pattern, StepMetrics


class Evaluation(Detector):
    """Speaks when it has risen above its best, or has been left behind by the loss in training."""

    name: ClassVar = "evaluation"
    kept: ClassVar = ("_best", "_trained", "_worse", "_told")

    def __init__(self, normal: Baselines) -> None:
        self._normal = normal
        self._best = math.nan
        self._trained = math.nan
        """The loss in training at the best evaluation."""
        self._worse = 0
        self._told = False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        if row.optimizer or math.isnan(row.eval_loss):
            return []
        recent = [loss for loss in self._normal.recent if math.isfinite(loss)]
        trained = sum(recent) / len(recent) if len(recent) == WHILE else math.nan
        if not row.eval_loss >= self._best:
            self._best, self._trained = row.eval_loss, trained
        room = self._normal.sight.worse * abs(self._best)
        if row.eval_loss <= self._best + room:
            self._worse, self._told = 0, False
            return []
        self._worse += 1
        if self._worse < AGAIN or self._told:
            return []
        self._told = True
        apart = trained < self._trained
        also = "while that in training goes on falling" if apart else "and that in training does not fall either"
        detail = f"the loss on held-out data is {row.eval_loss:.4g} and was {self._best:.4g} at best, {also}"
        return self.found(
            row,
            detail,
            Pattern.OVERFIT if apart else Pattern.NONE,
            eval_loss=row.eval_loss,
            best=self._best,
            apart=apart,
        )
