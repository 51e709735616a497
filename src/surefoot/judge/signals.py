"""One row compared with what is normal for the run, once for all detectors, and which of them it concerns."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import numpy as np

from surefoot.judge.baselines import Baseline, LayerBaselines, pending_rows
from surefoot.judge.thresholds import (
    CLEAR_RATIO,
    DOUBLE_RATIO,
    RECENT_ROWS,
    REPEAT_COUNT,
    SMALL_FRACTION,
    WINDOW_ROWS,
    Thresholds,
)
from surefoot.records import REFUSED, StepMetrics, StepOverrides

NO_OVERRIDES = StepOverrides()


class Sign:
    """What in a row concerns a detector; bits of plain integers, because every row is compared with every detector."""

    FIRST = 1 << 0
    """A row of the first optimizer, and..."""
    UPDATE = 1 << 1
    """... one that was applied."""
    REFUSED = 1 << 2
    SPIKE = 1 << 3
    HIGH_LOSS = 1 << 4
    """The loss is above its usual level."""
    SETTINGS = 1 << 5
    """Learning rate or momentum changed, are unusual, or are capped."""
    CLIPS = 1 << 6
    """The loop changes gradients before they are applied."""
    STALE = 1 << 7
    LARGE_LAYER = 1 << 8
    SHRUNK_LAYER = 1 << 9
    ZEROED_LAYER = 1 << 10
    MISSING_LAYER = 1 << 11
    FEW_SAMPLES = 1 << 12
    EVAL = 1 << 13
    """From here on: the row holds this measurement."""
    INPUTS = 1 << 14
    WEIGHTS = 1 << 15
    UNCHANGED = 1 << 16
    LOSS_SCALE = 1 << 17
    CLIP = 1 << 18
    SECONDS = 1 << 19
    MEMORY = 1 << 20
    UTILISATION = 1 << 21
    REPLICAS = 1 << 22


MEASURED = (
    (Sign.EVAL, "eval_loss"),
    (Sign.INPUTS, "input_absmax"),
    (Sign.WEIGHTS, "weight_norm"),
    (Sign.WEIGHTS, "update_ratio"),
    (Sign.UNCHANGED, "unchanged_fraction"),
    (Sign.LOSS_SCALE, "loss_scale"),
    (Sign.CLIP, "clip_factor"),
    (Sign.SECONDS, "seconds"),
    (Sign.MEMORY, "memory"),
    (Sign.UTILISATION, "utilisation"),
    (Sign.REPLICAS, "replicas"),
)
"""Columns that only some rows have; NaN where they were not measured."""
_measurements = attrgetter(*(column for _, column in MEASURED))
_MEASURED_SIGNS = tuple(sign for sign, _ in MEASURED)


class RowSignals:
    """The numbers of the current row, compared with the baselines."""

    ready: bool = False
    """The loss has a baseline."""
    sigma_factor: float = 1.0
    """How many times further than usual losses scatter now, because batches have fewer samples than before."""
    scale: float = math.nan
    """One sigma of the loss; NaN while there is no baseline."""
    z: float = math.nan
    """Sigmas of the loss above normal."""
    log_norm_ratio: float = math.nan
    """Log of the norm over the largest one accepted recently."""
    is_spike: bool = False
    """This row stands out so far that it is left out of the baselines, unless it lasts."""
    lr: float = math.nan
    """The learning rate that the step is made with."""
    lr_ratio: float = math.nan
    """The same over its usual value."""
    previous_lr: float = math.inf
    """The learning rate that the first optimizer's step before was made with."""
    recent: Sequence[float] = ()
    """The finite ones of the last losses before this row."""
    recent_mean: float = math.nan


class Signals(RowSignals):
    """The current row, and the baselines of loss, gradient norm, learning rate and batch size."""

    def __init__(self, thresholds: Thresholds, *, adversarial: bool = False) -> None:
        self.thresholds = thresholds
        self.adversarial = adversarial
        """The loss depends on what other optimizers do in turn, as a generator's does on its critic: that it rises, or
        does not fall, is no harm by itself."""
        self.level_sigmas = thresholds.loss_jump_sigmas if adversarial else thresholds.level_sigmas
        """Sigmas above normal from which a loss is too high."""
        self._jump_log_ratio = math.log(thresholds.norm_jump_ratio)
        self.layers = LayerBaselines(thresholds)
        self.loss = Baseline(thresholds.baseline_rows)
        self.log_norms: dict[int, Baseline] = {}
        """Of the log gradient norm, by optimizer."""
        self.lrs: dict[int, Baseline] = {}
        self.momenta: dict[int, float] = {}
        """The last healthy momentum, by optimizer."""
        self.log_applied_norms = Baseline(thresholds.baseline_rows)
        """Of the log norm that the first optimizer applied, where the loop changes gradients (clips them, say)."""
        self.batch_sizes = Baseline(thresholds.baseline_rows)
        self.overrides = NO_OVERRIDES
        """The overrides in force."""
        self.judges_loss = True
        """Whether `loss` holds the loss itself, and not another measure of progress."""
        self.start_loss = math.nan
        """The loss level the run began at: the median of the first 5 losses."""
        self.recent_losses: deque[float] = deque(maxlen=WINDOW_ROWS)
        """The last losses of applied updates, finite or not."""
        self.seen_losses: deque[float] = deque(maxlen=WINDOW_ROWS)
        """The last finite losses, applied or not, this row's included."""
        self.recent_norms: deque[float] = deque(maxlen=WINDOW_ROWS)
        self.applied_updates = 0
        self.applied_attempt = -1
        """The last applied attempt before this row: only such a step can have moved the weights."""
        self._first_losses: list[float] = []
        self._pending: deque[StepMetrics] = deque()
        self._spikes_in_row = 0
        self._spike_attempts: list[int] = []
        self._settings: tuple[float, float] = (math.nan, math.nan)
        """Learning rate and momentum of the first optimizer's row before, as the loop had set them."""
        self.first_lr = math.inf
        """The learning rate that the first optimizer's last step was made with."""
        self.max_lr = 0.0
        """The highest one since the eval loss was last healthy."""

    # -- the current row

    def compare(self, row: StepMetrics, layers: np.ndarray | None = None, *, learn: bool = True) -> int:
        """Compare a row with the baselines; returns its `Sign`s. The layers' baselines `learn` from healthy rows."""
        thresholds, k, loss = self.thresholds, row.optimizer, self.loss
        self.ready = len(loss) >= thresholds.min_baseline_rows
        small_batch = DOUBLE_RATIO * row.samples <= self.batch_sizes.max
        self.sigma_factor = self._scatter_factor(row.samples) if small_batch and row.samples > 0 else 1.0
        self.scale = self.sigma_factor * loss.sigma if self.ready else math.nan
        self.z = (row.loss - loss.median) / self.scale
        norms = self.log_norms.get(k)
        if norms is None or len(norms) < thresholds.min_baseline_rows or not row.norm > 0:
            self.log_norm_ratio = math.nan
        else:
            log_norm = math.log(row.norm / self.sigma_factor) if row.norm < math.inf else math.inf
            self.log_norm_ratio = log_norm - norms.max
        self.is_spike = self.log_norm_ratio > self._jump_log_ratio or (
            self.z > thresholds.loss_jump_sigmas and row.loss > CLEAR_RATIO * loss.max
        )
        lrs = self.lrs.get(k)
        self.lr = row.lr if self.overrides is NO_OVERRIDES else self.effective_lr(row)
        self.lr_ratio = self.lr / lrs.median if lrs is not None and lrs.median > 0 else math.nan
        signs = self._measured_signs(row)
        if k:
            return signs
        self.previous_lr, self.first_lr, self.max_lr = self.first_lr, self.lr, max(self.max_lr, self.lr)
        self.recent = list(filter(math.isfinite, self.recent_losses))
        self.recent_mean = sum(self.recent) / len(self.recent) if self.recent else math.nan
        if math.isfinite(row.loss):
            self.seen_losses.append(row.loss)
        return signs | self._first_optimizer_signs(row, layers, learn=learn)

    def _measured_signs(self, row: StepMetrics) -> int:
        """The signs that rows of every optimizer may have."""
        signs = 0
        for sign, value in zip(_MEASURED_SIGNS, _measurements(row), strict=True):
            if value == value:  # not NaN
                signs |= sign
        if self.is_spike:
            signs |= Sign.SPIKE
        if self.z > self.thresholds.level_sigmas:
            signs |= Sign.HIGH_LOSS
        return signs | (Sign.REFUSED if row.verdict in REFUSED else 0)

    def _first_optimizer_signs(self, row: StepMetrics, layers: np.ndarray | None, *, learn: bool) -> int:
        """The signs that only rows of the first optimizer have."""
        signs = Sign.FIRST | (0 if row.verdict else Sign.UPDATE)
        before, self._settings = self._settings, (row.lr, row.momentum)
        unusual = self.lr_ratio > self.thresholds.lr_jump_ratio or self.overrides.max_lr
        if unusual or self._settings != before:
            signs |= Sign.SETTINGS
        if len(self.log_applied_norms) >= self.thresholds.min_baseline_rows:
            signs |= Sign.CLIPS
        if row.stale_grads > 0:
            signs |= Sign.STALE
        if 0 < row.samples <= RECENT_ROWS:
            signs |= Sign.FEW_SAMPLES
        if layers is None:
            return signs
        self.layers.update(layers, learn=learn and not row.verdict)
        if self.layers.large:
            signs |= Sign.LARGE_LAYER
        if self.layers.shrunk:
            signs |= Sign.SHRUNK_LAYER
        if self.layers.zeroed:
            signs |= Sign.ZEROED_LAYER
        return signs | (0 if self.layers.all_present else Sign.MISSING_LAYER)

    def _scatter_factor(self, samples: float) -> float:
        """A mean over n times fewer samples scatters sqrt(n) times further, until nearly all batches are small."""
        ratio = self.batch_sizes.quantile(1 - SMALL_FRACTION) / samples
        return math.sqrt(ratio) if ratio >= DOUBLE_RATIO else 1.0

    def sigmas(self, loss: float) -> float:
        """How many sigmas a loss lies above normal."""
        return (loss - self.loss.median) / self.scale

    def norm_sigmas(self, row: StepMetrics) -> float:
        """How many sigmas the log norm lies above normal."""
        norms = self.log_norms.get(row.optimizer)
        if norms is None or len(norms) < self.thresholds.min_baseline_rows or not row.norm > 0:
            return math.nan
        log_norm = math.log(row.norm) if row.norm < math.inf else math.inf
        return (log_norm - norms.median) / max(norms.sigma, SMALL_FRACTION)

    def effective_lr(self, row: StepMetrics) -> float:
        """The learning rate that the step is made with: the loop's, under the overrides."""
        overrides, k = self.overrides, row.optimizer
        cap = overrides.max_lr[k] if k < len(overrides.max_lr) else math.inf
        return min(row.lr * overrides.lasting_lr_factor * overrides.lr_factor, cap)

    def effective_momentum(self, row: StepMetrics) -> float:
        """The momentum that the step is made with: the loop's, under the overrides."""
        caps = self.overrides.max_momentum
        return min(row.momentum, caps[row.optimizer]) if row.optimizer < len(caps) else row.momentum

    # -- the run so far

    @property
    def first_loss(self) -> float:
        """The very first loss."""
        return self._first_losses[0] if self._first_losses else math.nan

    @property
    def can_bound_loss(self) -> bool:
        """Whether a ceiling for the loss can be derived from its baseline."""
        return self.ready and self.judges_loss and not self.adversarial

    @property
    def healthy_settings(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Healthy learning rate and momentum of each optimizer; infinite where it has none."""
        count = 1 + max((*self.lrs, *self.momenta), default=-1)
        lrs = tuple(_healthy_lr(self.lrs[k]) if k in self.lrs else math.inf for k in range(count))
        return lrs, tuple(self.momenta.get(k, math.inf) for k in range(count))

    def add(self, row: StepMetrics) -> None:
        """Hold the current row back for a while if it was applied, and accept the oldest one held back."""
        first = not row.optimizer
        if first and row.norm > 0:
            self.recent_norms.append(row.norm)
        if row.verdict:
            return
        self.applied_updates += 1
        self.applied_attempt = row.attempt
        if first:
            self.recent_losses.append(row.loss)
            if len(self._first_losses) < RECENT_ROWS and math.isfinite(row.loss):
                self._first_losses.append(row.loss)
                self.start_loss = sorted(self._first_losses)[len(self._first_losses) // 2]
        if self.is_spike:
            self._spikes_in_row += 1
            earlier = [at for at in self._spike_attempts if row.attempt - at < self.thresholds.baseline_rows]
            self._spike_attempts = [*earlier, row.attempt]
            lasts = self._spikes_in_row >= RECENT_ROWS
            if not lasts and len(self._spike_attempts) <= REPEAT_COUNT:
                return  # else it stays, or spikes are so frequent that they are normal for this run
        else:
            self._spikes_in_row = 0
        self._pending.append(row)
        if len(self._pending) > pending_rows(self.applied_updates):
            self._accept(self._pending.popleft())

    def _accept(self, row: StepMetrics) -> None:
        k, window = row.optimizer, self.thresholds.baseline_rows
        if k == 0:
            self.loss.add(row.attempt, row.loss)
        if row.norm > 0:
            if k not in self.log_norms:
                self.log_norms[k] = Baseline(window)
            self.log_norms[k].add(row.attempt, math.log(row.norm))
        if row.applied_norm > 0 or (len(self.log_applied_norms) and k == 0 and row.norm > 0):
            applied_norm = row.norm if math.isnan(row.applied_norm) else row.applied_norm
            self.log_applied_norms.add(row.attempt, math.log(applied_norm))
        if row.lr > 0:
            if k not in self.lrs:
                self.lrs[k] = Baseline(self.thresholds.slow_baseline_rows)
            self.lrs[k].add(row.attempt, row.lr if self.overrides is NO_OVERRIDES else self.effective_lr(row))
        if row.samples > 0:
            self.batch_sizes.add(row.attempt, row.samples)
        if math.isfinite(row.momentum):
            self.momenta[k] = row.momentum

    def restart_max_lr(self) -> None:
        """The eval loss is healthy: only later learning rates can have done it harm."""
        self.max_lr = self.first_lr

    def forget_recent(self) -> None:
        """The last losses say nothing about the next ones."""
        self.recent_losses.clear()
        self.seen_losses.clear()

    def drop_losses(self) -> None:
        """Forget all losses: they turned out to be no measure of progress."""
        self.loss = Baseline(self.thresholds.baseline_rows)
        self.forget_recent()
        self.start_loss, self._first_losses = math.nan, []
        self._pending = deque(replace(row, loss=math.nan) for row in self._pending)

    def rewound(self, attempt: int) -> None:
        """The run was rewound to the state after this attempt: drop everything later."""
        named = (self.loss, self.log_applied_norms, self.batch_sizes)
        for baseline in (*named, *self.log_norms.values(), *self.lrs.values()):
            baseline.drop_from(attempt + 1)
        self._pending.clear()
        self.forget_recent()
        self._spikes_in_row = 0

    # -- state

    def state_dict(self) -> dict[str, Any]:
        return {
            "loss": self.loss.state_dict(),
            "applied": self.log_applied_norms.state_dict(),
            "norms": {k: baseline.state_dict() for k, baseline in self.log_norms.items()},
            "rates": {k: baseline.state_dict() for k, baseline in self.lrs.items()},
            "momenta": dict(self.momenta),
            "start": self.start_loss,
            "sizes": self.batch_sizes.state_dict(),
            "first": list(self._first_losses),
            "recent": list(self.recent_losses),
            "seen": list(self.seen_losses),
            "recent_norms": list(self.recent_norms),
            "lr": [self.first_lr, self.max_lr],
            "settings": list(self._settings),
            "landed": self.applied_updates,
            "applied_attempt": self.applied_attempt,
            "spikes": self._spikes_in_row,
            "spiked": list(self._spike_attempts),
            "waiting": [_pending_state(row) for row in self._pending],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        thresholds = self.thresholds
        self.loss.load_state_dict(state["loss"])
        self.log_applied_norms.load_state_dict(state["applied"])
        self.log_norms = _load_by_optimizer(state["norms"], thresholds.baseline_rows)
        self.lrs = _load_by_optimizer(state["rates"], thresholds.slow_baseline_rows)
        self.momenta = {int(k): momentum for k, momentum in state["momenta"].items()}
        self.batch_sizes.load_state_dict(state["sizes"])
        self.start_loss, self._first_losses = state["start"], list(state["first"])
        self.applied_updates, self.applied_attempt = state["landed"], state["applied_attempt"]
        self.recent_losses = deque(state["recent"], maxlen=WINDOW_ROWS)
        self.seen_losses = deque(state["seen"], maxlen=WINDOW_ROWS)
        self.recent_norms = deque(state["recent_norms"], maxlen=WINDOW_ROWS)
        self.first_lr, self.max_lr = state["lr"]
        lr, momentum = state.get("settings", (math.nan, math.nan))
        self._settings = (lr, momentum)
        self._spikes_in_row, self._spike_attempts = state["spikes"], list(state["spiked"])
        self._pending = deque(StepMetrics(**fields) for fields in state["waiting"])


def _load_by_optimizer(state: dict[Any, Any], window: int) -> dict[int, Baseline]:
    baselines: dict[int, Baseline] = {}
    for k, values in state.items():
        baselines[int(k)] = Baseline(window)
        baselines[int(k)].load_state_dict(values)
    return baselines


def _healthy_lr(lrs: Baseline) -> float:
    """The last accepted learning rate, or the usual one if that is lower: the lr may have crept up."""
    return min(lrs.last, lrs.median) if len(lrs) else math.inf


def _pending_state(row: StepMetrics) -> dict[str, Any]:
    """The fields of a pending row that are accepted later."""
    names = ("step", "attempt", "time", "optimizer", "loss", "norm", "applied_norm", "lr", "momentum", "samples")
    return {name: getattr(row, name) for name in names}
