"""The rate or the momentum is set to something else than this run is used to."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from surefoot.judge.baselines import Baselines
from surefoot.judge.detectors.base import Detector
from surefoot.judge.policy import PART, PATIENCE
from surefoot.records import Finding, StepMetrics


class Settings(Detector):
    name: ClassVar = "settings"
    kept: ClassVar = ("_rate", "_momentum", "_fast", "_slow")

    def __init__(self, normal: Baselines) -> None:
        self._normal = normal
        self._rate = math.nan
        self._momentum = math.nan
        self._fast = False
        self._slow = False

    def rewound(self) -> None:
        self._fast = self._fast and bool(self._normal.asked.max_lr)  # held now, and told already

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        if row.optimizer:
            return []
        found = [*self._faster(row), *self._slower(row), *self._stiffer(row)]
        self._rate, self._momentum = row.lr, row.momentum
        return found

    def _faster(self, row: StepMetrics) -> list[Finding]:
        ratio, sight = self._normal.rate_ratio(row), self._normal.sight
        held = self._normal.asked.max_lr
        if held and row.lr > sight.faster * held[0]:
            ratio = row.lr / held[0]  # no step is made with it, but the loop has set it
        if not self._normal.formed or not ratio > sight.faster:
            self._fast = self._fast and ratio > sight.faster / 2
            return []
        if self._fast:
            return []
        self._fast = True
        detail = f"the rate is {row.lr:.3g}, {ratio:.3g} times what it usually was"
        detail += f"; it is held at {held[0]:.3g}" if held else ""
        at_once = row.lr / self._rate if self._rate > 0 else math.nan
        return self.found(row, detail, lr=row.lr, times=ratio, at_once=at_once)

    def _slower(self, row: StepMetrics) -> list[Finding]:
        fell = self._rate / row.lr if row.lr > 0 else math.inf if row.lr == 0 and self._rate > 0 else math.nan
        if not fell > self._normal.sight.slower:
            self._slow = self._slow and not row.lr > self._rate
            return []
        if self._slow:
            return []
        self._slow = True
        recent = [loss for loss in self._normal.recent if math.isfinite(loss)]
        level, start = sum(recent) / max(len(recent), 1), self._normal.first
        early = row.step < PATIENCE and start > 0 and level > (1 - PART) * start
        began = "; before that it was so high that nothing was learnt" if early else ""
        detail = f"the rate fell from {self._rate:.3g} to {row.lr:.3g} in one step{began}"
        return self.found(row, detail, severe=early, lr=row.lr, before=self._rate, early=early)

    def _stiffer(self, row: StepMetrics) -> list[Finding]:
        before, now = self._momentum, row.momentum
        if not (math.isfinite(before) and math.isfinite(now)) or now <= before:
            return []
        if now < 1 and (1 - before) / (1 - now) < self._normal.sight.faster:
            return []
        never = ", which never forgets" if now >= 1 else ""
        detail = f"the momentum was raised from {before:.4g} to {now:.4g}{never}"
        return self.found(row, detail, momentum=now, before=before)
