"""A device that idles for long: is it the data, or the launches?"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from surefoot.judge.detectors.base import Detector
from surefoot.judge.policy import Thresholds
from surefoot.records import Finding, StepMetrics


class Bottleneck(Detector):
    """Speaks once when utilisation stays low, and again only after it has been high."""

    name: ClassVar = "bottleneck"
    kept: ClassVar = ("_low", "_since", "_wait", "_told")

    def __init__(self, sight: Thresholds) -> None:
        self._sight = sight
        self._low = 0
        self._since: float | None = None
        self._wait = 0.0
        self._told = False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        if math.isnan(row.utilisation):
            return []
        if row.utilisation >= self._sight.idle:
            self._low, self._since, self._wait, self._told = 0, None, 0.0, False
            return []
        self._since = row.time if self._since is None else self._since
        self._low += 1
        share = row.data_wait / row.seconds if row.seconds > 0 and not math.isnan(row.data_wait) else 0.0
        self._wait += (share - self._wait) / self._low
        if row.time - self._since < self._sight.idle_seconds or self._told:
            return []
        self._told = True
        data = self._wait > self._sight.waits
        why = "the data comes too slowly: more workers, prefetch" if data else "launches: larger batch, or compile"
        detail = f"the device has been under {self._sight.idle:.0%} busy for long; {why}"
        return self.found(row, detail, data=data, utilisation=row.utilisation, data_wait_share=self._wait)
