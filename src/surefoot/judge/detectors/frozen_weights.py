"""Weights that do not move: no gradient, no optimizer, or updates that are next to nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from surefoot.judge.baselines import Baselines
from surefoot.judge.detectors.base import Detector
from surefoot.judge.detectors.layers import NONFINITE, LayerPast
from surefoot.judge.policy import AGAIN, FEW
from surefoot.records import Finding, StepMetrics


class FrozenWeights(Detector):
    name: ClassVar = "still"
    kept: ClassVar = (
        "_owned_told",
        "_without",
        "_absent_told",
        "_usual",
        "_looks",
        "_slow",
        "_slow_told",
        "_moving",
        "_had_all",
        "_landed",
    )

    def __init__(
        self, names: Sequence[str], owned: int | None, normal: Baselines, past: LayerPast, *, adaptive: bool
    ) -> None:
        self._names = names
        self._owned = len(names) if owned is None else owned
        """So many tensors, the first ones, are held by an optimizer."""
        self._normal = normal
        self._past = past
        self._adaptive = adaptive
        """Updates do not grow with the gradients."""
        self._owned_told = False
        self._had = np.zeros(0, dtype=bool)
        """Which tensors had gradients."""
        self._had_all = False
        """All of them had: then nothing can be new."""
        self._without = 0
        self._absent_told = False
        self._usual = math.nan
        """Logarithm of the usual update at a rate of one."""
        self._looks = 0
        self._slow = 0
        self._slow_told = False
        self._landed = -1
        """The last attempt that landed: only such a step can have moved the weights."""
        self._moving: list[float] = []
        """What share of the weights the last steps left as they were."""

    def rewound(self) -> None:
        """Updates are known anew: those before the way back may have been the trouble itself."""
        self._usual, self._looks, self._slow, self._slow_told = math.nan, 0, 0, False
        self._moving = []

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        told = [*self._unowned(row), *self._absent(row, layers), *self._small(row), *self._rounded(row)]
        self._landed = row.attempt if row.applied else self._landed
        return told

    def _unowned(self, row: StepMetrics) -> list[Finding]:
        if self._owned_told or self._owned >= len(self._names):
            return []
        self._owned_told = True
        left = list(self._names)[self._owned :]
        detail = f"{len(left)} trainable tensors are in no optimizer and will never move: {', '.join(left[:5])}"
        return self.found(row, detail, layers=left[:5], tensors=len(left), of=len(self._names))

    def _absent(self, row: StepMetrics, layers: np.ndarray | None) -> list[Finding]:
        """Tensors that had gradients and have none any more."""
        if layers is None or row.optimizer or not row.applied:
            return []
        if self._past.whole and self._had_all:
            self._without, self._absent_told = 0, False
            return []
        present = layers[: self._owned, NONFINITE] >= 0
        if len(present) != len(self._had):
            self._had = present
        gone = self._had & ~present
        if not gone.any():
            self._without, self._absent_told = 0, False
            self._had = self._had | present
            self._had_all = len(self._had) == self._owned and bool(self._had.all())
            return []
        self._without += 1
        if self._without < FEW or self._absent_told:
            return []
        self._absent_told = True
        names = [str(self._names[i]) for i in np.flatnonzero(gone).tolist()[:5] if i < len(self._names)]
        detail = f"{int(gone.sum())} tensors have no gradient any more: {', '.join(names)}"
        return self.found(row, detail, layers=names, tensors=int(gone.sum()), of=len(present))

    def _small(self, row: StepMetrics) -> list[Finding]:
        """Updates that have become far smaller than the rate explains."""
        if not row.update_ratio > 0 or not (rate := self._normal.rate(row)) > 0:
            return []
        known = self._normal.norms.get(row.optimizer)
        if not self._adaptive and known is None:
            return []
        size = math.log(row.update_ratio / rate) - (0.0 if self._adaptive or known is None else known.middle)
        if self._looks < AGAIN:
            self._looks += 1
            self._usual = size if math.isnan(self._usual) else min(self._usual, size)
            return []
        if size > self._usual - math.log(self._normal.sight.still):
            self._slow, self._slow_told = 0, False
            self._usual += (size - self._usual) / (8 if size > self._usual else 64)
            return []
        self._slow += 1
        # A look takes in few of the weights, so that one alone tells little.
        if self._slow < AGAIN or self._slow_told or self._silent:
            return []
        self._slow_told = True
        detail = f"the weights hardly move: updates are {math.exp(self._usual - size):.3g} times smaller than before"
        return self.found(row, detail, update_ratio=row.update_ratio, smaller=math.exp(self._usual - size))

    @property
    def _silent(self) -> bool:
        """Most tensors have no gradient any more: that is why nothing moves, and another trouble."""
        zeros = self._past.zeros_now
        return bool(zeros.size) and float(np.median(zeros)) > self._normal.sight.dead / 2

    def _rounded(self, row: StepMetrics) -> list[Finding]:
        """Weights that a whole step leaves exactly as they were, though there are gradients and a rate."""
        if self._landed != row.attempt - 1:  # the step that `unmoved` tells of was refused, which moves nothing
            return []
        if math.isnan(row.unchanged_fraction) or not row.applied or not row.lr > 0 or not row.norm > 0:
            return []
        known, self._moving = self._moving, [*self._moving, row.unchanged_fraction][-AGAIN - 1 :]
        if len(known) <= AGAIN:
            return []
        bound = min(known[:-1]) + self._normal.sight.rounded
        if not min(known[-1], row.unchanged_fraction) > bound or self._silent:
            return []
        self._moving = []  # from here on this is the usual
        detail = f"{row.unchanged_fraction:.0%} of the weights are exactly what they were a step before: updates are rounded away"
        return self.found(row, detail, unchanged_fraction=row.unchanged_fraction)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"had": self._had.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._had = np.array(state["had"], dtype=bool)
