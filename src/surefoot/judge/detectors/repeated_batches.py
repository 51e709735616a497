"""Losses that come again and again in the same order: the loader goes round the same few batches."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from surefoot.judge.detectors.base import Detector
from surefoot.judge.policy import LONG, STRETCH, WHILE, Thresholds
from surefoot.records import Finding, Pattern, StepMetrics


class RepeatedBatches(Detector):
    """From one round to the next such losses differ by their trend alone, where they used to differ by chance."""

    name: ClassVar = "repeats"
    kept: ClassVar = ("_losses", "_usual", "_rows", "_told")

    def __init__(self, sight: Thresholds) -> None:
        self._sight = sight
        self._losses: list[float] = []
        self._usual = math.nan
        """How far losses used to differ from one to the next."""
        self._rows = 0
        self._told = False

    def rewound(self) -> None:
        self._losses = []

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        if row.optimizer or not row.applied or not math.isfinite(row.loss):
            return []
        self._losses = [*self._losses, row.loss][-LONG:]
        self._rows += 1
        # A look takes a while; and how losses scatter while a run is learning the most is not how they usually do.
        if self._rows % STRETCH or self._rows < 2 * LONG or len(self._losses) < LONG:
            return []
        losses = np.array(self._losses)
        apart = [_scatter(losses[k:] - losses[:-k]) for k in range(1, WHILE + 1)]
        if math.isnan(self._usual):
            self._usual = apart[0]
        length = int(np.argmin(apart)) + 1
        if not apart[length - 1] < self._sight.repeats * self._usual:
            self._usual += (apart[0] - self._usual) / 4
            self._told = False
            return []
        if self._told:
            return []
        self._told = True
        detail = f"the same losses come again every {length} steps: the loader goes round the same batches"
        return self.found(row, detail, Pattern.OVERFIT, period=length, apart=apart[length - 1], usual=self._usual)


def _scatter(values: np.ndarray) -> float:
    return float(np.median(np.abs(values - np.median(values))))
