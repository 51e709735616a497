"""Gradients that nobody has emptied: each update adds to those before."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from surefoot.judge.detectors.base import Detector
from surefoot.records import Finding, StepMetrics


class StaleGrads(Detector):
    """Speaks once it has happened at two updates running, and again only after it has ended."""

    name: ClassVar = "stale_grads"
    kept: ClassVar = ("_times", "_told")

    def __init__(self) -> None:
        self._times = 0
        self._told = False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        if row.optimizer or not row.stale_grads >= 0:
            return []
        self._times = self._times + 1 if row.stale_grads >= 1 else 0
        if self._times < 2:  # once may be meant
            self._told = self._told and row.stale_grads > 0
            return []
        if self._told:
            return []
        self._told = True
        return self.found(row, "backward adds to the gradients of the update before: nobody has emptied them")
