"""Memory that creeps up and never comes down."""

from __future__ import annotations

import itertools
import math
from typing import ClassVar

import numpy as np

from surefoot.judge.detectors.base import Detector
from surefoot.judge.policy import LONG, PART, WHILE, Thresholds
from surefoot.records import Finding, StepMetrics


class MemoryCreep(Detector):
    name: ClassVar = "memory"
    kept: ClassVar = ("_readings", "_last", "_told")

    def __init__(self, sight: Thresholds) -> None:
        self._sight = sight
        self._readings: list[float] = []
        self._last = math.nan
        self._told = False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        if row.step < LONG or not row.memory > 0 or row.memory == self._last:
            return []
        self._last = row.memory
        self._readings = [*self._readings, row.memory][-4 * WHILE :]
        if self._told or len(self._readings) < WHILE:
            return []
        tail = self._readings[-WHILE:]
        moves = [b - a for a, b in itertools.pairwise(tail)]
        rises, risen, fallen = (
            sum(m > 0 for m in moves),
            sum(m for m in moves if m > 0),
            -sum(m for m in moves if m < 0),
        )
        grown = tail[-1] / self._readings[0]
        # As a garbage collector does it: a coming and going.
        given_back = fallen > PART * risen
        if rises < WHILE - 2 or given_back or grown < self._sight.leak:
            return []
        self._told = True
        detail = f"memory has grown from {self._readings[0] / 1e6:.4g} to {tail[-1] / 1e6:.4g} MB without a pause"
        return self.found(row, detail, memory=row.memory, grown=grown)
