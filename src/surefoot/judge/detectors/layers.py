"""Layers whose gradients explode, vanish or fall silent, each against its own past."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from surefoot.judge.detectors.base import Detector
from surefoot.judge.policy import FEW, HUGE, ROUNDING, STRETCH, Thresholds
from surefoot.records import LAYER_STATS, Finding, StepMetrics

NORM, ZEROS, NONFINITE = (LAYER_STATS.index(name) for name in ("norm", "zeros", "nonfinite"))


class LayerPast:
    """Each layer's usual norm (as a logarithm) and share of zeros, and how far it has been from them lately."""

    def __init__(self) -> None:
        self.rows = 0
        self._start(0)
        self.present = np.zeros(0, dtype=bool)
        self.whole = False
        """Every tensor had a gradient in the last row."""
        self._all = np.zeros(0, dtype=bool)
        """True for every tensor, once each of them has a past."""

    def _start(self, tensors: int) -> None:
        """Norms and shares of zeros lie one below the other, so that one call does for both."""
        self._usual, self._now = np.zeros((2, tensors)), np.zeros((2, tensors))
        self._seen, self._scratch = np.zeros((2, tensors)), np.zeros((2, tensors))
        self.usual, self.zeros = self._usual
        self.now, self.zeros_now = self._now
        """Logarithm of the norm over the usual one, smoothed over the last few rows; the same for zeros."""

    def take(self, row: StepMetrics, layers: np.ndarray, *, learn: bool) -> None:
        """Take in a row; what is normal is learnt from healthy rows alone."""
        norm = layers[:, NORM]
        if len(norm) == len(self._all) and self.rows and _sound(norm):
            self._take_all(norm, layers[:, ZEROS], learn=learn)
            return
        norm, share = norm.astype(np.float64), layers[:, ZEROS].astype(np.float64)
        if len(norm) != len(self.usual):  # the first row, or other tensors than before
            self.rows = 0
            self._start(len(norm))
            self.usual.fill(np.nan)
        self.present, self.whole = layers[:, NONFINITE] >= 0, False
        fit = self.present & (norm > 0) & np.isfinite(norm)
        log = np.log(np.where(fit, norm, 1.0))
        fresh = fit & np.isnan(self.usual)
        self.usual[fresh] = log[fresh]
        ahead = np.where(fit, log - self.usual, 0.0)
        self.now += (ahead - self.now) / 3
        if self.rows == 0:
            self.zeros[:] = share
        self.zeros_now += (np.where(self.present, share - self.zeros, 0.0) - self.zeros_now) / 3
        if learn:
            self.rows += 1
            weight = max(1 / STRETCH, 1 / self.rows)
            self.usual += np.where(fit, weight * (log - self.usual), 0.0)
            self.zeros += np.where(self.present, weight * (share - self.zeros), 0.0)
        self._all = np.ones(0 if np.isnan(self.usual).any() else len(norm), dtype=bool)

    def _take_all(self, norm: np.ndarray, share: np.ndarray, *, learn: bool) -> None:
        """The same where every tensor has a gradient and a past: nearly always, and in a fraction of the time."""
        self.present, self.whole = self._all, True
        ahead, change = self._seen, self._scratch
        np.log(norm, out=ahead[0], dtype=np.float64)
        ahead[1] = share
        ahead -= self._usual
        np.subtract(ahead, self._now, out=change)
        change /= 3
        self._now += change
        if learn:
            self.rows += 1
            ahead *= max(1 / STRETCH, 1 / self.rows)
            self._usual += ahead

    @property
    def counts(self) -> np.ndarray:
        """Tensors whose gradient is more than the noise that is left of zero, as a bias before a batch norm has."""
        known = self.usual[np.isfinite(self.usual)]
        return self.usual > np.median(known) - np.log(ROUNDING) if len(known) else np.zeros(len(self.usual), dtype=bool)

    @property
    def formed(self) -> bool:
        return self.rows >= STRETCH

    def state_dict(self) -> dict[str, Any]:
        names = ("usual", "zeros", "now", "zeros_now")
        return {"rows": self.rows} | {name: getattr(self, name).tolist() for name in names}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = state["rows"]
        self._start(len(state["usual"]))
        for name in ("usual", "zeros", "now", "zeros_now"):
            getattr(self, name)[:] = state[name]
        self._all, self.whole = np.zeros(0, dtype=bool), False


def _sound(norms: np.ndarray) -> bool:
    """Every tensor has a gradient with a norm that has a logarithm: that of one without a gradient is 0."""
    return bool(len(norms) and np.minimum.reduce(norms) > 0 and np.maximum.reduce(norms) < np.inf)


class _OfLayers(Detector):
    """Speaks when some layers have been beyond a bound for a few rows, which is no accident."""

    kept: ClassVar = ("_since", "_told")
    stays: ClassVar = FEW

    def __init__(self, past: LayerPast, names: Sequence[str], sight: Thresholds) -> None:
        self._past = past
        self._names = names
        self._sight = sight
        self._since = 0
        self._told = False

    def rewound(self) -> None:
        self._since, self._told = 0, False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Finding]:
        if layers is None or row.optimizer or not row.applied:
            return []
        which = self._beyond(layers) if self._any_beyond(layers) else None
        if which is None or not which.any():
            self._since, self._told = 0, False
            return []
        self._since += 1
        if self._since < self.stays or self._told:
            return []
        self._told = True
        worst = [str(self._names[i]) if i < len(self._names) else str(i) for i in np.flatnonzero(which).tolist()[:5]]
        return self._say(row, layers, which, worst)

    def _any_beyond(self, layers: np.ndarray) -> bool:
        """Whether any layer may be beyond it: nearly never, and told by one look at the outermost."""
        raise NotImplementedError

    def _beyond(self, layers: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def _say(self, row: StepMetrics, layers: np.ndarray, which: np.ndarray, worst: list[str]) -> list[Finding]:
        raise NotImplementedError


class Exploding(_OfLayers):
    """A layer's norm is large, and far above its own past."""

    name: ClassVar = "exploding"

    def _any_beyond(self, layers: np.ndarray) -> bool:
        return bool(np.fmax.reduce(layers[:, NORM], initial=0.0) > self._sight.explodes)

    def _beyond(self, layers: np.ndarray) -> np.ndarray:
        large = layers[:, NORM] > self._sight.explodes
        return large & (self._past.now > np.log(HUGE)) & self._past.formed

    def _say(self, row: StepMetrics, layers: np.ndarray, which: np.ndarray, worst: list[str]) -> list[Finding]:
        top = float(layers[which, NORM].max())
        severe = "severe: " if top > HUGE * self._sight.explodes else ""
        detail = f"{severe}the gradients of {len(worst)} or more layers explode, up to {top:.3g}: {', '.join(worst)}"
        return self.found(row, detail, layers=worst, share=float(which.mean()), norm=top)


class Vanishing(_OfLayers):
    """A layer's norm is next to nothing, or far below its own past."""

    name: ClassVar = "vanishing"

    def _any_beyond(self, layers: np.ndarray) -> bool:
        return bool(np.fmin.reduce(self._past.now, initial=0.0) < -min(1.0, math.log(self._sight.fades)))

    def _beyond(self, layers: np.ndarray) -> np.ndarray:
        norm = layers[:, NORM]
        tiny = (norm > 0) & (norm < self._sight.vanishes) & (self._past.now < -1.0)
        faded = (self._past.now < -np.log(self._sight.fades)) & (norm > 0)
        silent = self._past.zeros_now > self._sight.dead / 2  # fallen silent, which is another trouble
        return (tiny | faded) & ~silent & self._past.counts & self._past.formed

    def _say(self, row: StepMetrics, layers: np.ndarray, which: np.ndarray, worst: list[str]) -> list[Finding]:
        least = float(layers[which, NORM].min())
        detail = f"the gradients of {int(which.sum())} tensors vanish, down to {least:.3g}: {', '.join(worst)}"
        return self.found(row, detail, layers=worst, share=float(which.mean()), norm=least)


class Dead(_OfLayers):
    """Many more of a layer's gradients are exactly zero than before: its units have fallen silent."""

    name: ClassVar = "dead"
    stays: ClassVar = 2 * FEW

    def _any_beyond(self, layers: np.ndarray) -> bool:
        return bool(np.fmax.reduce(self._past.zeros_now, initial=0.0) > self._sight.dead)

    def _beyond(self, layers: np.ndarray) -> np.ndarray:
        return (self._past.zeros_now > self._sight.dead) & self._past.formed & self._past.present

    def _say(self, row: StepMetrics, layers: np.ndarray, which: np.ndarray, worst: list[str]) -> list[Finding]:
        most = float(layers[which, ZEROS].max())
        detail = f"up to {most:.0%} of the gradients are exactly zero, far more than before: {', '.join(worst)}"
        return self.found(row, detail, layers=worst, share=float(which.mean()), zeros=most)
