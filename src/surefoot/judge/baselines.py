"""What is normal for a run: robust baselines of accepted values, which never include the trouble being judged."""

from __future__ import annotations

import bisect
import math
from collections import deque
from typing import Any

import numpy as np

from surefoot.judge.thresholds import (
    DOUBLE_RATIO,
    FROZEN_RATIO,
    NOTABLE_FRACTION,
    ROUNDING_NOISE_RATIO,
    TREND_ROWS,
    WINDOW_ROWS,
    Thresholds,
)
from surefoot.records import LAYER_STATS

NORM, ZEROS, NONFINITE = (LAYER_STATS.index(name) for name in ("norm", "zeros", "nonfinite"))


def pending_rows(known: int) -> int:
    """How many of the newest values are held back from a baseline of `known` values: few at first, then 16."""
    return min(WINDOW_ROWS, 1 + known // 4)


class Baseline:
    """The last accepted values, also kept sorted, so that median and sigma cost nothing."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._values: deque[tuple[int, float]] = deque()
        self._sorted: list[float] = []
        self._sigma = 0.0
        """Cached; 0 after a change."""
        self.median = self.max = math.nan

    def __len__(self) -> int:
        return len(self._values)

    def add(self, attempt: int, value: float) -> None:
        if not math.isfinite(value):
            return
        values, ordered = self._values, self._sorted
        values.append((attempt, value))
        bisect.insort(ordered, value)
        if len(values) > self._window:
            del ordered[bisect.bisect_left(ordered, values.popleft()[1])]
        self.median, self.max = ordered[round(0.5 * (len(ordered) - 1))], ordered[-1]
        self._sigma = 0.0

    def drop_from(self, attempt: int) -> None:
        """Drop the values of this attempt and later ones."""
        self.load_state_dict({"values": [pair for pair in self._values if pair[0] < attempt]})

    def before(self, attempt: int) -> Baseline:
        """The baseline of the values before an attempt; this one where those are too few."""
        earlier = Baseline(self._window)
        earlier.load_state_dict({"values": [pair for pair in self._values if pair[0] < attempt]})
        return earlier if len(earlier) >= min(WINDOW_ROWS // 2, len(self)) else self

    @property
    def sigma(self) -> float:
        """Robust standard deviation, from the interquartile range; never quite zero."""
        if not self._sorted:
            return math.nan
        if not self._sigma:
            last = len(self._sorted) - 1
            sigma = (self._sorted[round(0.75 * last)] - self._sorted[round(0.25 * last)]) / 1.349
            self._sigma = max(sigma, 1e-3 * abs(self.median), 1e-30)
        return self._sigma

    def quantile(self, fraction: float) -> float:
        return self._sorted[round(fraction * (len(self._sorted) - 1))] if self._sorted else math.nan

    @property
    def last(self) -> float:
        return self._values[-1][1] if self._values else math.nan

    def state_dict(self) -> dict[str, Any]:
        return {"values": [list(pair) for pair in self._values]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._values.clear()
        self._sorted.clear()
        self.median = self.max = math.nan
        for attempt, value in state["values"]:
            self.add(attempt, value)


class LayerBaselines:
    """Each tensor's usual log gradient norm and fraction of zeros, and how far it has moved from them recently."""

    def __init__(self, thresholds: Thresholds) -> None:
        self._thresholds = thresholds
        self.rows = 0
        self._allocate(0)
        self.present = np.zeros(0, dtype=bool)
        self.all_present = False
        """Every tensor had a gradient in the last row."""
        self._all = np.zeros(0, dtype=bool)
        """True for every tensor, once each of them has a baseline."""
        self.large = self.shrunk = self.zeroed = False
        """Some tensor's norm is large, has become small, or more of it is zero: whether it is much too large, small or
        dead, the detectors say."""

    def _allocate(self, tensors: int) -> None:
        """Norms and zero fractions share one array, so that one numpy call updates both."""
        self._usual, self._change = np.zeros((2, tensors)), np.zeros((2, tensors))
        self._deviation, self._scratch = np.zeros((2, tensors)), np.zeros((2, tensors))
        self.log_norms, self.zero_fractions = self._usual
        self.norm_change, self.zeros_change = self._change
        """Log of the norm over the usual one, smoothed over the last few rows; the same difference for zeros."""

    def update(self, layers: np.ndarray, *, learn: bool) -> None:
        """Add a row; the baselines learn from healthy rows only."""
        norm, zeros = layers[:, NORM], layers[:, ZEROS]
        max_norm = np.fmax.reduce(norm, initial=0.0)
        known = len(norm) == len(self._all) and self.rows > 0
        if known and len(norm) and np.minimum.reduce(norm) > 0 and max_norm < np.inf:
            self._update_all(norm, zeros, learn=learn)
        else:
            self._update_some(layers, norm.astype(np.float64), zeros.astype(np.float64), learn=learn)
        thresholds = self._thresholds
        self.large = max_norm > thresholds.exploding_norm
        self.shrunk = np.fmin.reduce(self.norm_change, initial=0.0) < -math.log(DOUBLE_RATIO * FROZEN_RATIO)
        self.zeroed = np.fmax.reduce(self.zeros_change, initial=0.0) > 2 * NOTABLE_FRACTION

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

    def _update_some(self, layers: np.ndarray, norm: np.ndarray, zeros: np.ndarray, *, learn: bool) -> None:
        """Tensors without a gradient, without a baseline, or with a norm that has no logarithm are left out."""
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
