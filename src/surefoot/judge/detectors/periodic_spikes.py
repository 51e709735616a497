"""Trouble that comes back at equal distances: every epoch, every shard."""

from __future__ import annotations

import itertools
from typing import ClassVar

import numpy as np

from surefoot.judge.baselines import Baselines
from surefoot.judge.detectors.base import Detector
from surefoot.judge.policy import AGAIN, LONG
from surefoot.records import Finding, StepMetrics, Verdict


class PeriodicSpikes(Detector):
    """Speaks once the distances between refused or leaping steps repeat."""

    name: ClassVar = "rhythm"
    kept: ClassVar = ("_at", "_last", "_told")

    def __init__(self, normal: Baselines) -> None:
        self._normal = normal
        self._at: list[int] = []
        self._last = -LONG
        self._told = False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        bad = row.verdict in (Verdict.NONFINITE, Verdict.NORM_OUTLIER) or (row.applied and self._normal.spikes(row))
        if not bad or row.optimizer:
            return []
        before, self._last = self._last, row.attempt
        if row.attempt - before <= AGAIN:
            return []  # still the same trouble
        self._at = [*self._at, row.attempt][-1 - self._normal.sight.rhythm :]
        gaps = [b - a for a, b in itertools.pairwise(self._at)]
        if len(gaps) < self._normal.sight.rhythm or max(gaps) - min(gaps) > 1:
            self._told = False
            return []
        if self._told:
            return []
        self._told = True
        return self.found(row, f"trouble comes back every {gaps[-1]} steps", period=gaps[-1])
