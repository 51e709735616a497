"""Gradients: exploding, vanishing or dead by each layer's baseline, rescaled with the loss, too large at the start, or
never zeroed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from surefoot.judge.baselines import Baselines
from surefoot.judge.detectors.base import Detector
from surefoot.judge.thresholds import (
    CLEAR_RATIO,
    HUGE_RATIO,
    LOG_FACTOR_TOLERANCE,
    NOTABLE_FRACTION,
    RECENT_ROWS,
    REPEAT_COUNT,
    ROUNDING_NOISE_RATIO,
    STRONG_RATIO,
    TREND_ROWS,
    Thresholds,
)
from surefoot.records import LAYER_STATS, Finding, StepMetrics

NORM, ZEROS, NONFINITE = (LAYER_STATS.index(name) for name in ("norm", "zeros", "nonfinite"))


class LayerBaselines:
    """Each tensor's usual log gradient norm and fraction of zeros, and how far it has moved from them recently."""

    def __init__(self) -> None:
        self.rows = 0
        self._allocate(0)
        self.present = np.zeros(0, dtype=bool)
        self.all_present = False
        """Every tensor had a gradient in the last row."""
        self._all = np.zeros(0, dtype=bool)
        """True for every tensor, once each of them has a baseline."""

    def _allocate(self, tensors: int) -> None:
        """Norms and zero fractions share one array, so that one numpy call updates both."""
        self._usual, self._change = np.zeros((2, tensors)), np.zeros((2, tensors))
        self._deviation, self._scratch = np.zeros((2, tensors)), np.zeros((2, tensors))
        self.log_norms, self.zero_fractions = self._usual
        self.norm_change, self.zeros_change = self._change
        """Log of the norm over the usual one, smoothed over the last few rows; the same difference for zeros."""

    def update(self, row: StepMetrics, layers: np.ndarray, *, learn: bool) -> None:
        """Add a row; the baselines learn from healthy rows only."""
        norm = layers[:, NORM]
        if len(norm) == len(self._all) and self.rows and _all_finite_positive(norm):
            self._update_all(norm, layers[:, ZEROS], learn=learn)
            return
        norm, zeros = norm.astype(np.float64), layers[:, ZEROS].astype(np.float64)
        if len(norm) != len(self.log_norms):  # the first row, or other tensors than before
            self.rows = 0
            self._allocate(len(norm))
            self.log_norms.fill(np.nan)
        self.present, self.all_present = layers[:, NONFINITE] >= 0, False
        valid = self.present & (norm > 0) & np.isfinite(norm)
        log_norm = np.log(np.where(valid, norm, 1.0))
        new = valid & np.isnan(self.log_norms)
        self.log_norms[new] = log_norm[new]
        deviation = np.where(valid, log_norm - self.log_norms, 0.0)
        self.norm_change += (deviation - self.norm_change) / 3
        if self.rows == 0:
            self.zero_fractions[:] = zeros
        self.zeros_change += (np.where(self.present, zeros - self.zero_fractions, 0.0) - self.zeros_change) / 3
        if learn:
            self.rows += 1
            weight = max(1 / TREND_ROWS, 1 / self.rows)
            self.log_norms += np.where(valid, weight * (log_norm - self.log_norms), 0.0)
            self.zero_fractions += np.where(self.present, weight * (zeros - self.zero_fractions), 0.0)
        self._all = np.ones(0 if np.isnan(self.log_norms).any() else len(norm), dtype=bool)

    def _update_all(self, norm: np.ndarray, zeros: np.ndarray, *, learn: bool) -> None:
        """The usual case, in a fraction of the time: every tensor has a gradient and a baseline."""
        self.present, self.all_present = self._all, True
        deviation, step = self._deviation, self._scratch
        np.log(norm, out=deviation[0], dtype=np.float64)
        deviation[1] = zeros
        deviation -= self._usual
        np.subtract(deviation, self._change, out=step)
        step /= 3
        self._change += step
        if learn:
            self.rows += 1
            deviation *= max(1 / TREND_ROWS, 1 / self.rows)
            self._usual += deviation

    @property
    def above_noise(self) -> np.ndarray:
        """Tensors whose gradient is more than rounding noise around zero, which a bias before a batch norm has."""
        known = self.log_norms[np.isfinite(self.log_norms)]
        if not len(known):
            return np.zeros(len(self.log_norms), dtype=bool)
        return self.log_norms > np.median(known) - np.log(ROUNDING_NOISE_RATIO)

    @property
    def ready(self) -> bool:
        return self.rows >= TREND_ROWS

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows} | {key: values.tolist() for key, values in self._arrays().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]
        self._allocate(len(state["usual"]))
        for key, values in self._arrays().items():
            values[:] = state[key]
        self._all, self.all_present = np.zeros(0, dtype=bool), False

    def _arrays(self) -> dict[str, np.ndarray]:
        """The saved arrays, by their key in the state."""
        return {
            "usual": self.log_norms,
            "zeros": self.zero_fractions,
            "now": self.norm_change,
            "zeros_now": self.zeros_change,
        }


def _all_finite_positive(norms: np.ndarray) -> bool:
    """Every tensor has a gradient whose norm has a logarithm; the norm of one without a gradient is 0."""
    return bool(len(norms) and np.minimum.reduce(norms) > 0 and np.maximum.reduce(norms) < np.inf)


class LayerDetector(Detector):
    """Base of detectors that report layers which stay beyond a bound for a few rows."""

    state_names: ClassVar = ("_rows_beyond", "_reported")
    min_rows: ClassVar = RECENT_ROWS

    def __init__(self, layer_baselines: LayerBaselines, names: Sequence[str], thresholds: Thresholds) -> None:
        self._layer_baselines = layer_baselines
        self._names = names
        self._thresholds = thresholds
        self._rows_beyond = 0
        self._reported = False

    def rewound(self) -> None:
        self._rows_beyond, self._reported = 0, False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        if layers is None or row.optimizer or not row.applied:
            return []
        beyond = self._beyond(layers) if self._any_beyond(layers) else None
        if beyond is None or not beyond.any():
            self._rows_beyond, self._reported = 0, False
            return []
        self._rows_beyond += 1
        if self._rows_beyond < self.min_rows or self._reported:
            return []
        self._reported = True
        indices = np.flatnonzero(beyond).tolist()[:5]
        names = [str(self._names[i]) if i < len(self._names) else str(i) for i in indices]
        return self._report_layers(row, layers, beyond, names)

    def _any_beyond(self, layers: np.ndarray) -> bool:
        """A quick check of the extreme value: whether any layer may be beyond the bound, which is rare."""
        raise NotImplementedError

    def _beyond(self, layers: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def _report_layers(
        self, row: StepMetrics, layers: np.ndarray, beyond: np.ndarray, names: list[str]
    ) -> list[Finding]:
        raise NotImplementedError


class ExplodingGrads(LayerDetector):
    """A layer's gradient norm is large, and far above its own baseline."""

    name: ClassVar = "exploding_grads"

    def _any_beyond(self, layers: np.ndarray) -> bool:
        return bool(np.fmax.reduce(layers[:, NORM], initial=0.0) > self._thresholds.exploding_norm)

    def _beyond(self, layers: np.ndarray) -> np.ndarray:
        past = self._layer_baselines
        large = layers[:, NORM] > self._thresholds.exploding_norm
        return large & (past.norm_change > np.log(HUGE_RATIO)) & past.ready

    def _report_layers(
        self, row: StepMetrics, layers: np.ndarray, beyond: np.ndarray, names: list[str]
    ) -> list[Finding]:
        max_norm = float(layers[beyond, NORM].max())
        severe = "severe: " if max_norm > HUGE_RATIO * self._thresholds.exploding_norm else ""
        count = int(beyond.sum())
        detail = f"{severe}gradients of {count} tensors explode, up to a norm of {max_norm:.3g}: {', '.join(names)}"
        return self.report(row, detail, layers=names, share=float(beyond.mean()), norm=max_norm)


class VanishingGrads(LayerDetector):
    """A layer's gradient norm is nearly zero, or far below its own baseline."""

    name: ClassVar = "vanishing_grads"

    def _any_beyond(self, layers: np.ndarray) -> bool:
        lowest = np.fmin.reduce(self._layer_baselines.norm_change, initial=0.0)
        return bool(lowest < -min(1.0, math.log(self._thresholds.vanishing_ratio)))

    def _beyond(self, layers: np.ndarray) -> np.ndarray:
        norm, past, thresholds = layers[:, NORM], self._layer_baselines, self._thresholds
        tiny = (norm > 0) & (norm < thresholds.vanishing_norm) & (past.norm_change < -1.0)
        faded = (past.norm_change < -np.log(thresholds.vanishing_ratio)) & (norm > 0)
        dead = past.zeros_change > thresholds.dead_zeros_rise / 2  # `DeadUnits` reports those
        return (tiny | faded) & ~dead & past.above_noise & past.ready

    def _report_layers(
        self, row: StepMetrics, layers: np.ndarray, beyond: np.ndarray, names: list[str]
    ) -> list[Finding]:
        min_norm = float(layers[beyond, NORM].min())
        detail = (
            f"gradients of {int(beyond.sum())} tensors vanish, down to a norm of {min_norm:.3g}: {', '.join(names)}"
        )
        return self.report(row, detail, layers=names, share=float(beyond.mean()), norm=min_norm)


class DeadUnits(LayerDetector):
    """Many more of a layer's gradient values are exactly zero than before: its units no longer learn."""

    name: ClassVar = "dead_units"
    min_rows: ClassVar = 2 * RECENT_ROWS

    def _any_beyond(self, layers: np.ndarray) -> bool:
        highest = np.fmax.reduce(self._layer_baselines.zeros_change, initial=0.0)
        return bool(highest > self._thresholds.dead_zeros_rise)

    def _beyond(self, layers: np.ndarray) -> np.ndarray:
        past = self._layer_baselines
        return (past.zeros_change > self._thresholds.dead_zeros_rise) & past.ready & past.present

    def _report_layers(
        self, row: StepMetrics, layers: np.ndarray, beyond: np.ndarray, names: list[str]
    ) -> list[Finding]:
        max_zeros = float(layers[beyond, ZEROS].max())
        detail = (
            f"up to {max_zeros:.0%} of the gradient values are exactly zero, far more than before: {', '.join(names)}"
        )
        return self.report(row, detail, layers=names, share=float(beyond.mean()), zeros=max_zeros)


class LossRescaled(Detector):
    """Reports a loss and gradients that were all multiplied by one factor, as by a missing division."""

    name: ClassVar = "loss_rescaled"
    state_names: ClassVar = ("_reported", "factor", "_factors")

    def __init__(self, baselines: Baselines, layer_baselines: LayerBaselines) -> None:
        self._baselines = baselines
        self._layer_baselines = layer_baselines
        self._reported = False
        self.factor = 1.0
        """What the loss was multiplied by at this step, as far as the numbers show; 1 when it was not."""
        self._factors: list[float] = []

    def rewound(self) -> None:
        self._reported, self.factor, self._factors = False, 1.0, []

    @property
    def recent_factor(self) -> float:
        """The median factor of the last few steps."""
        return sorted(self._factors)[len(self._factors) // 2] if self._factors else 1.0

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        # One side of a GAN that gains ground makes the loss and all gradients of the other side grow alike.
        self.factor = 1.0 if self._baselines.adversarial else self._common_factor(row, layers)
        self._factors = [*self._factors, self.factor][-RECENT_ROWS:]
        self._reported = self._reported and self.factor != 1.0
        # Small batches scatter; and several harder batches in a row may look like a small factor.
        min_rows = REPEAT_COUNT + (self.factor < STRONG_RATIO)
        if self.factor == 1.0 or self._reported or sum(factor != 1.0 for factor in self._factors) < min_rows:
            return []
        self._reported = True
        detail = f"the loss and all gradients are about {self.factor:.3g} times what they were"
        return self.report(row, detail, factor=self.factor)

    def _common_factor(self, row: StepMetrics, layers: np.ndarray | None) -> float:
        layer_baselines, baselines = self._layer_baselines, self._baselines
        usual = baselines.loss.median
        if layers is None or row.optimizer or not layer_baselines.ready or not usual > 0 or not row.loss > 0:
            return 1.0
        loss = math.log(row.loss / usual)
        # Smaller batches make all gradients larger, and sometimes the loss too; so may chance, where losses scatter.
        stands_out = baselines.z(row.loss) > baselines.thresholds.level_sigmas
        if not loss < math.inf or not stands_out or baselines.sigma_factor > 1:
            return 1.0
        norms = layers[:, NORM]
        valid = (norms > 0) & np.isfinite(norms) & np.isfinite(layer_baselines.log_norms)
        if valid.sum() < 3:
            return 1.0
        log_ratios = np.log(norms[valid].astype(np.float64)) - layer_baselines.log_norms[valid]
        median = float(np.median(log_ratios))
        # A very large factor allows for a larger gap: nothing else multiplies all gradients alike by that much.
        tolerance = max(LOG_FACTOR_TOLERANCE, NOTABLE_FRACTION * median)
        if median < math.log(CLEAR_RATIO) or abs(loss - median) > tolerance:
            return 1.0
        low, high = np.quantile(log_ratios, (NOTABLE_FRACTION, 1 - NOTABLE_FRACTION))
        if high - low > CLEAR_RATIO * tolerance:
            return 1.0
        return math.exp(median)


class LargeInitialGrads(Detector):
    """Reports once when the first 5 gradient norms are huge; later ones have a baseline to be compared with."""

    name: ClassVar = "large_initial_grads"
    state_names: ClassVar = ("_norms",)

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self._norms: list[float] = []

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        if row.optimizer or not row.applied or len(self._norms) >= RECENT_ROWS:
            return []
        self._norms = [*self._norms, row.norm]
        median = sorted(self._norms)[len(self._norms) // 2]
        if len(self._norms) < RECENT_ROWS or not median > self._thresholds.exploding_norm:
            return []
        return self.report(row, f"the first gradient norms are about {median:.3g}", norm=median)


class StaleGrads(Detector):
    """Reports gradients that were not zeroed before two updates in a row, so that each backward adds to the last."""

    name: ClassVar = "stale_grads"
    state_names: ClassVar = ("_updates", "_reported")

    def __init__(self) -> None:
        self._updates = 0
        """Updates in a row with stale gradients."""
        self._reported = False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        if row.optimizer or not row.stale_grads >= 0:
            return []
        self._updates = self._updates + 1 if row.stale_grads >= 1 else 0
        if self._updates < 2:  # a single one may be intended
            self._reported = self._reported and row.stale_grads > 0
            return []
        if self._reported:
            return []
        self._reported = True
        detail = (
            "gradients were not zeroed: backward adds to those of the update before; call zero_grad() after each step"
        )
        return self.report(row, detail)
