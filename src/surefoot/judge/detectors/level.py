"""A loss that has risen and stays there."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from surefoot.judge.baselines import Baselines
from surefoot.judge.detectors.base import Detector
from surefoot.judge.detectors.loss_rescaled import LossRescaled
from surefoot.judge.policy import STRETCH, WHILE
from surefoot.records import Finding, Pattern, StepMetrics


class Level(Detector):
    """Speaks when the level rises, and again when the run has lost what it had learnt: that is grave."""

    name: ClassVar = "level"
    kept: ClassVar = ("_told", "_grave", "_losses", "_lowest", "_slowly")

    def __init__(self, normal: Baselines, units: LossRescaled) -> None:
        self._normal = normal
        self._units = units
        self._told = False
        self._grave = False
        self._losses: list[float] = []
        self._lowest: list[float] = []
        """Mean and error of the lowest stretch of losses so far."""
        self._slowly = False

    def rewound(self) -> None:
        self._told = self._grave = False
        self._losses = []

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        normal, sight = self._normal, self._normal.sight
        recent = [loss for loss in normal.recent if math.isfinite(loss)]
        if row.optimizer or not normal.formed or len(recent) < sight.lasting:
            return []
        slowly = [] if normal.contested else self._little_by_little(row)
        return [*self._at_once(row, recent), *slowly]

    def _little_by_little(self, row: StepMetrics) -> list[Finding]:
        """The mean of one stretch of losses after the other, against the lowest of them."""
        if row.applied and math.isfinite(row.loss):
            self._losses.append(row.loss)
        if len(self._losses) < STRETCH:
            return []
        kept = sorted(self._losses)[STRETCH // 8 : -STRETCH // 8]  # without the few that stand out
        self._losses = []
        mean = _mean(kept)
        error = math.sqrt(sum((x - mean) ** 2 for x in kept)) / len(kept)
        lowest, far = self._lowest, math.inf
        if not lowest or mean < lowest[0]:
            self._lowest = [mean, error]
        if lowest:
            far = (mean - lowest[0]) / max(math.hypot(error, lowest[1]), 1e-30)
        # Of a loss below zero, such as a policy's, no share tells anything: its zero means nothing.
        sight = self._normal.sight
        risen = bool(lowest) and far > sight.raised and mean - lowest[0] > sight.slow_rise * lowest[0] > 0
        if not risen or self._slowly or self._told:
            self._slowly = risen
            return []
        self._slowly = True
        detail = f"the loss has risen slowly, from {lowest[0]:.4g} to {mean:.4g} over {STRETCH} steps each"
        start = self._normal.start
        return self.found(
            row,
            detail,
            level=mean,
            normal=lowest[0],
            deviations=far,
            of_start=mean / start if start else math.nan,
            slowly=True,
        )

    def _at_once(self, row: StepMetrics, recent: list[float]) -> list[Finding]:
        normal, sight = self._normal, self._normal.sight
        last = sorted(recent[-sight.lasting :])
        level = last[len(last) // 2]
        sudden = normal.z(level)
        slow = normal.z(_mean(recent)) if len(recent) == WHILE and not normal.contested else 0.0
        if sudden < normal.raised and slow < sight.creeping:
            self._told &= sudden > sight.raised / 2 or slow > sight.creeping / 2
            self._grave &= self._told
            return []
        real = level / self._units.lately  # whatever unit it is told in
        lost = (
            not normal.contested
            and normal.start > 0  # else no multiple of what it began with means anything
            and sudden > sight.far
            and real > sight.lost * max(normal.start, normal.loss.top) > 0
            and row.applied
        )
        lost = lost and normal.z(last[0]) > sight.raised  # all of them: under a heavy tail some are as ever
        if self._told and (self._grave or not lost):
            return []
        grave, self._told, self._grave = lost, True, self._grave or lost
        shown = level if sudden >= sight.raised else _mean(recent)
        far = max(sudden, slow) if sudden < sight.raised else sudden
        compared = f"{shown / normal.start:.3g} times what it began with" if grave else f"{far:.3g} deviations"
        return self.found(
            row,
            f"the loss has risen from {normal.loss.middle:.4g} to {shown:.4g} and stays there ({compared})",
            Pattern.JUMP if sudden > sight.far else Pattern.NONE,
            severe=grave,
            level=shown,
            normal=normal.loss.middle,
            deviations=far,
            of_start=shown / normal.start if normal.start else math.nan,
        )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
