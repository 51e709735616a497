"""Gradients: exploding, vanishing or dead by each layer's baseline, rescaled with the loss, too large at the start, or
never zeroed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from surefoot.judge.baselines import NORM, ZEROS
from surefoot.judge.detectors.base import NOTHING, Findings, WatchingDetector
from surefoot.judge.evidence import LayersEvidence, RescaledEvidence
from surefoot.judge.signals import Sign, Signals
from surefoot.judge.thresholds import (
    CLEAR_RATIO,
    DOUBLE_RATIO,
    FROZEN_RATIO,
    HUGE_RATIO,
    LOG_FACTOR_TOLERANCE,
    NOTABLE_FRACTION,
    RECENT_ROWS,
    REPEAT_COUNT,
    STRONG_RATIO,
    Thresholds,
)
from surefoot.records import FindingKind, Severity, StepMetrics


class LayerDetector(WatchingDetector):
    """Base of detectors that report layers which stay beyond a bound for a few rows."""

    state_names: ClassVar = ("_rows_beyond", "_reported")
    min_rows: ClassVar = RECENT_ROWS

    def __init__(self, signals: Signals, names: Sequence[str]) -> None:
        super().__init__()
        self._baselines = signals.layers
        self._names = names
        self._thresholds = signals.thresholds
        self._rows_beyond = 0
        self._reported = False

    def rewound(self) -> None:
        self._rows_beyond, self._reported = 0, False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> Findings:
        if layers is None or row.optimizer or not row.applied:
            return NOTHING
        beyond = self._beyond(layers)
        self.watching = bool(beyond.any())
        if not self.watching:
            self._rows_beyond, self._reported = 0, False
            return NOTHING
        self._rows_beyond += 1
        if self._rows_beyond < self.min_rows or self._reported:
            return NOTHING
        self._reported = True
        indices = np.flatnonzero(beyond).tolist()[:5]
        names = [str(self._names[i]) if i < len(self._names) else str(i) for i in indices]
        detail, evidence = self._describe(layers, beyond, names)
        return self.report(row, detail, evidence)

    def _beyond(self, layers: np.ndarray) -> np.ndarray:
        """The layers beyond the bound."""
        raise NotImplementedError

    def _describe(self, layers: np.ndarray, beyond: np.ndarray, names: list[str]) -> tuple[str, LayersEvidence]:
        raise NotImplementedError


class ExplodingGrads(LayerDetector):
    """A layer's gradient norm is large, and far above its own baseline."""

    kind: ClassVar = FindingKind.EXPLODING_GRADS
    wakes_on: ClassVar = Sign.LARGE_LAYER

    def _beyond(self, layers: np.ndarray) -> np.ndarray:
        large = layers[:, NORM] > self._thresholds.exploding_norm
        return large & (self._baselines.norm_change > np.log(HUGE_RATIO)) & self._baselines.ready

    def _describe(self, layers: np.ndarray, beyond: np.ndarray, names: list[str]) -> tuple[str, LayersEvidence]:
        max_norm = float(layers[beyond, NORM].max())
        severe = "severe: " if max_norm > HUGE_RATIO * self._thresholds.exploding_norm else ""
        count = int(beyond.sum())
        detail = f"{severe}gradients of {count} tensors explode, up to a norm of {max_norm:.3g}: {', '.join(names)}"
        return detail, LayersEvidence(layers=names, share=float(beyond.mean()), norm=max_norm)


class VanishingGrads(LayerDetector):
    """A layer's gradient norm is far below its own baseline."""

    kind: ClassVar = FindingKind.VANISHING_GRADS
    wakes_on: ClassVar = Sign.SHRUNK_LAYER

    def _beyond(self, layers: np.ndarray) -> np.ndarray:
        norm, baselines = layers[:, NORM], self._baselines
        faded = (baselines.norm_change < -np.log(DOUBLE_RATIO * FROZEN_RATIO)) & (norm > 0)
        dead = baselines.zeros_change > NOTABLE_FRACTION  # `DeadUnits` reports those
        return faded & ~dead & baselines.above_noise & baselines.ready

    def _describe(self, layers: np.ndarray, beyond: np.ndarray, names: list[str]) -> tuple[str, LayersEvidence]:
        min_norm = float(layers[beyond, NORM].min())
        count = int(beyond.sum())
        detail = f"gradients of {count} tensors vanish, down to a norm of {min_norm:.3g}: {', '.join(names)}"
        return detail, LayersEvidence(layers=names, share=float(beyond.mean()), norm=min_norm)


class DeadUnits(LayerDetector):
    """Many more of a layer's gradient values are exactly zero than before: its units no longer learn."""

    kind: ClassVar = FindingKind.DEAD_UNITS
    wakes_on: ClassVar = Sign.ZEROED_LAYER
    min_rows: ClassVar = 2 * RECENT_ROWS

    def _beyond(self, layers: np.ndarray) -> np.ndarray:
        baselines = self._baselines
        return (baselines.zeros_change > 2 * NOTABLE_FRACTION) & baselines.ready & baselines.present

    def _describe(self, layers: np.ndarray, beyond: np.ndarray, names: list[str]) -> tuple[str, LayersEvidence]:
        max_zeros = float(layers[beyond, ZEROS].max())
        detail = (
            f"up to {max_zeros:.0%} of the gradient values are exactly zero, far more than before: {', '.join(names)}"
        )
        return detail, LayersEvidence(layers=names, share=float(beyond.mean()), zeros=max_zeros)


class LossRescaled(WatchingDetector):
    """Reports a loss and gradients that were all multiplied by one factor, as by a missing division."""

    kind: ClassVar = FindingKind.LOSS_RESCALED
    wakes_on: ClassVar = Sign.HIGH_LOSS
    state_names: ClassVar = ("_reported", "factor", "_factors")

    def __init__(self, signals: Signals) -> None:
        super().__init__()
        self._signals = signals
        self._reported = False
        self.factor = 1.0
        """What the loss was multiplied by at this step, as far as the numbers show; 1 when it was not."""
        self._factors: list[float] = []

    def rewound(self) -> None:
        self._reported, self.factor, self._factors, self.watching = False, 1.0, [], True

    @property
    def recent_factor(self) -> float:
        """The median factor of the last few steps."""
        return sorted(self._factors)[len(self._factors) // 2] if self._factors else 1.0

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> Findings:
        # One side of a GAN that gains ground makes the loss and all gradients of the other side grow alike.
        self.factor = 1.0 if self._signals.adversarial else self._common_factor(row, layers)
        self._factors = [*self._factors, self.factor][-RECENT_ROWS:]
        self._reported = self._reported and self.factor != 1.0
        rescaled_rows = sum(factor != 1.0 for factor in self._factors)
        self.watching = rescaled_rows > 0 or len(self._factors) < RECENT_ROWS
        # Small batches scatter; and several harder batches in a row may look like a small factor.
        min_rows = REPEAT_COUNT + (self.factor < STRONG_RATIO)
        if self.factor == 1.0 or self._reported or rescaled_rows < min_rows:
            return NOTHING
        self._reported = True
        detail = f"the loss and all gradients are about {self.factor:.3g} times what they were"
        return self.report(row, detail, RescaledEvidence(factor=self.factor))

    def _common_factor(self, row: StepMetrics, layers: np.ndarray | None) -> float:
        signals, baselines = self._signals, self._signals.layers
        usual = signals.loss.median
        if layers is None or row.optimizer or not baselines.ready or not usual > 0 or not row.loss > 0:
            return 1.0
        loss = math.log(row.loss / usual)
        # Smaller batches make all gradients larger, and sometimes the loss too; so may chance, where losses scatter.
        stands_out = signals.z > signals.thresholds.level_sigmas
        if not loss < math.inf or not stands_out or signals.sigma_factor > 1:
            return 1.0
        norms = layers[:, NORM]
        valid = (norms > 0) & np.isfinite(norms) & np.isfinite(baselines.log_norms)
        if valid.sum() < 3:
            return 1.0
        log_ratios = np.log(norms[valid].astype(np.float64)) - baselines.log_norms[valid]
        median = float(np.median(log_ratios))
        # A very large factor allows for a larger gap: nothing else multiplies all gradients alike by that much.
        tolerance = max(LOG_FACTOR_TOLERANCE, NOTABLE_FRACTION * median)
        if median < math.log(CLEAR_RATIO) or abs(loss - median) > tolerance:
            return 1.0
        low, high = np.quantile(log_ratios, (NOTABLE_FRACTION, 1 - NOTABLE_FRACTION))
        if high - low > CLEAR_RATIO * tolerance:
            return 1.0
        return math.exp(median)


class LargeInitialGrads(WatchingDetector):
    """Reports once when the first 5 gradient norms are huge; later ones have a baseline to be compared with."""

    kind: ClassVar = FindingKind.LARGE_INITIAL_GRADS
    severity: ClassVar = Severity.REPORT_ONLY
    wakes_on: ClassVar = 0
    state_names: ClassVar = ("_norms",)

    def __init__(self, thresholds: Thresholds) -> None:
        super().__init__()
        self._thresholds = thresholds
        self._norms: list[float] = []

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> Findings:
        self.watching = len(self._norms) < RECENT_ROWS
        if row.optimizer or not row.applied or not self.watching:
            return NOTHING
        self._norms = [*self._norms, row.norm]
        median = sorted(self._norms)[len(self._norms) // 2]
        if len(self._norms) < RECENT_ROWS or not median > self._thresholds.exploding_norm:
            return NOTHING
        return self.report(row, f"the first gradient norms are about {median:.3g}", {"norm": median})


class StaleGrads(WatchingDetector):
    """Reports gradients that were not zeroed before two updates in a row, so that each backward adds to the last."""

    kind: ClassVar = FindingKind.STALE_GRADS
    wakes_on: ClassVar = Sign.STALE
    state_names: ClassVar = ("_updates", "_reported")

    def __init__(self) -> None:
        super().__init__()
        self._updates = 0
        """Updates in a row with stale gradients."""
        self._reported = False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> Findings:
        if row.optimizer or not row.stale_grads >= 0:
            return NOTHING
        self._updates = self._updates + 1 if row.stale_grads >= 1 else 0
        self.watching = self._updates > 0 or (self._reported and row.stale_grads > 0)
        if self._updates < 2:  # a single one may be intended
            self._reported = self._reported and row.stale_grads > 0
            return NOTHING
        if self._reported:
            return NOTHING
        self._reported = True
        detail = (
            "gradients were not zeroed: backward adds to those of the update before; call zero_grad() after each step"
        )
        return self.report(row, detail)
