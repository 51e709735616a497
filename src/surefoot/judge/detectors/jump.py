"""A loss or a norm that leaps from one step to the next."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from surefoot.judge.baselines import Baselines
from surefoot.judge.detectors.base import Detector
from surefoot.judge.policy import AGAIN, LONG
from surefoot.records import Finding, Pattern, StepMetrics, Verdict


class Jump(Detector):
    """Speaks at the first step of each leap; grave when it is huge, or comes again."""

    name: ClassVar = "jump"
    kept: ClassVar = ("_last", "_quiet", "_episodes")

    def __init__(self, normal: Baselines) -> None:
        self._normal = normal
        self._last = -LONG - 1
        self._quiet = AGAIN
        self._episodes = 0

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        normal = self._normal
        if row.verdict not in (Verdict.APPLIED, Verdict.NORM_OUTLIER) or not normal.formed:
            return []
        if not normal.spikes(row):
            self._quiet += 1
            return []
        begins, self._quiet = self._quiet >= AGAIN, 0
        if not begins:
            return []
        ratio, z = normal.norm_ratio(row), normal.z(row.loss)
        leaps, huge = ratio > math.log(normal.sight.leap), ratio > math.log(normal.sight.huge)
        if leaps:
            # A second leap within long says that the first was no accident.
            self._episodes = self._episodes + 1 if row.attempt - self._last <= LONG else 1
            self._last = row.attempt
        what = [f"the loss is {row.loss:.4g}, {z:.3g} deviations above normal"] if z > normal.sight.far else []
        if ratio > math.log(normal.sight.jump):
            what.append(f"the gradient norm is {math.exp(min(ratio, 700.0)):.3g} times the largest lately")
        return self.found(
            row,
            " and ".join(what),
            Pattern.JUMP,
            severe=row.applied and ((leaps and self._episodes > 1) or (huge and z > normal.sight.far)),
            loss=row.loss,
            norm=row.norm,
            deviations=z,
            norm_ratio=ratio,
            huge=huge and row.applied,
            times=self._episodes,
        )
