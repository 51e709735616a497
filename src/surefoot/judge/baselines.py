"""What is normal for this run: robust baselines over accepted values, which never include the trouble being judged."""

from __future__ import annotations

import bisect
import math
from collections import deque
from dataclasses import replace
from typing import Any

from surefoot.judge.thresholds import DOUBLE_RATIO, RECENT_ROWS, SMALL_FRACTION, WINDOW_ROWS, Thresholds
from surefoot.records import StepMetrics, StepOverrides


def pending_rows(known: int) -> int:
    """How many of the newest values are held back from a baseline of `known` values: few at first, then 16."""
    return min(WINDOW_ROWS, 1 + known // 4)


class Baseline:
    """The last accepted values, also kept sorted, so that median and sigma cost nothing."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._values: deque[tuple[int, float]] = deque()
        self._sorted: list[float] = []
        self._sigma = math.nan
        """Cached; 0 after a change."""

    def __len__(self) -> int:
        return len(self._values)

    def add(self, attempt: int, value: float) -> None:
        if not math.isfinite(value):
            return
        self._values.append((attempt, value))
        bisect.insort(self._sorted, value)
        if len(self._values) > self._window:
            self._remove(self._values.popleft()[1])
        self._sigma = 0.0

    def drop_from(self, attempt: int) -> None:
        """Drop the values of this attempt and later ones."""
        while self._values and self._values[-1][0] >= attempt:
            self._remove(self._values.pop()[1])
        self._sigma = 0.0

    def before(self, attempt: int) -> Baseline:
        """The baseline of the values before an attempt; this one where those are too few."""
        earlier = Baseline(self._window)
        earlier.load_state_dict({"values": [pair for pair in self._values if pair[0] < attempt]})
        return earlier if len(earlier) >= min(WINDOW_ROWS // 2, len(self)) else self

    def _remove(self, value: float) -> None:
        self._sorted.pop(bisect.bisect_left(self._sorted, value))

    @property
    def median(self) -> float:
        return self._sorted[round(0.5 * (len(self._sorted) - 1))] if self._sorted else math.nan

    @property
    def max(self) -> float:
        return self._sorted[-1] if self._sorted else math.nan

    @property
    def sigma(self) -> float:
        """Robust standard deviation, from the interquartile range; never quite zero."""
        if not self._sorted:
            return math.nan
        if not self._sigma:
            sigma = (self.quantile(0.75) - self.quantile(0.25)) / 1.349
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
        for attempt, value in state["values"]:
            self.add(attempt, value)
        self._sigma = 0.0


class Baselines:
    """Baselines of the loss and of each optimizer's gradient norm, and the rows that are being judged against them."""

    def __init__(self, thresholds: Thresholds, *, adversarial: bool = False) -> None:
        self.thresholds = thresholds
        self.adversarial = adversarial
        """The loss depends on what other optimizers do in turn, as a generator's does on its critic: that it rises, or
        does not fall, is no harm by itself."""
        self.loss = Baseline(thresholds.baseline_rows)
        self.log_norms: dict[int, Baseline] = {}
        """Of the log gradient norm, by optimizer."""
        self.lrs: dict[int, Baseline] = {}
        self.momenta: dict[int, float] = {}
        """The last healthy momentum, by optimizer."""
        self.log_applied_norms = Baseline(thresholds.baseline_rows)
        """Of the log norm that the first optimizer applied, where the loop changes gradients (clips them, say)."""
        self.overrides = StepOverrides()
        """The overrides in force."""
        self.judges_loss = True
        """Whether `loss` holds the loss itself, and not another measure of progress."""
        self.batch_sizes = Baseline(thresholds.baseline_rows)
        self.sigma_factor = 1.0
        """How many times further than usual losses scatter now, because batches have fewer samples than before."""
        self.start_loss = math.nan
        """The loss level the run began at: the median of the first 5 losses."""
        self.recent_losses: deque[float] = deque(maxlen=WINDOW_ROWS)
        """The last losses of applied updates, finite or not."""
        self.applied_updates = 0
        self._first_losses: list[float] = []
        self._pending: deque[StepMetrics] = deque()
        self._checked_row: StepMetrics | None = None
        """The row `is_spike` was last asked about, and its answer."""
        self._checked_is_spike = False
        self._spikes_in_row = 0
        self._spike_attempts: list[int] = []

    @property
    def first_loss(self) -> float:
        """The very first loss."""
        return self._first_losses[0] if self._first_losses else math.nan

    @property
    def ready(self) -> bool:
        return len(self.loss) >= self.thresholds.min_baseline_rows

    @property
    def can_bound_loss(self) -> bool:
        """Whether a ceiling for the loss can be derived from its baseline."""
        return self.ready and self.judges_loss and not self.adversarial

    @property
    def usual_batch_size(self) -> float:
        return self.batch_sizes.median if len(self.batch_sizes) else math.nan

    def adjust_for_batch_size(self, row: StepMetrics) -> None:
        """A mean over n times fewer samples scatters sqrt(n) times further, until nearly all batches are small."""
        ratio = self.batch_sizes.quantile(1 - SMALL_FRACTION) / row.samples if row.samples > 0 else math.nan
        self.sigma_factor = math.sqrt(ratio) if ratio >= DOUBLE_RATIO else 1.0

    @property
    def level_sigmas(self) -> float:
        """Sigmas above normal from which a loss is too high."""
        return self.thresholds.loss_jump_sigmas if self.adversarial else self.thresholds.level_sigmas

    def z(self, loss: float) -> float:
        """How many sigmas a loss lies above normal."""
        return (loss - self.loss.median) / (self.sigma_factor * self.loss.sigma) if self.ready else math.nan

    def log_norm_ratio(self, row: StepMetrics) -> float:
        """Log of the norm over the largest one accepted recently."""
        norms = self._norms_for(row)
        if norms is None:
            return math.nan
        return math.log(row.norm / self.sigma_factor) - norms.max if math.isfinite(row.norm) else math.inf

    def norm_z(self, row: StepMetrics) -> float:
        """How many sigmas the log norm lies above normal."""
        norms = self._norms_for(row)
        if norms is None:
            return math.nan
        if not math.isfinite(row.norm):
            return math.inf
        return (math.log(row.norm) - norms.median) / max(norms.sigma, SMALL_FRACTION)

    def _norms_for(self, row: StepMetrics) -> Baseline | None:
        """The norms to compare this row's with; None where there are too few, or the row has none."""
        norms = self.log_norms.get(row.optimizer)
        too_few = norms is None or len(norms) < self.thresholds.min_baseline_rows
        return None if too_few or not row.norm > 0 else norms

    def lr_ratio(self, row: StepMetrics) -> float:
        """The learning rate over its usual value."""
        lrs = self.lrs.get(row.optimizer)
        known = lrs is not None and len(lrs) > 0 and lrs.median > 0
        return self.effective_lr(row) / lrs.median if lrs is not None and known else math.nan

    def effective_lr(self, row: StepMetrics) -> float:
        """The learning rate that the step is made with: the loop's, under the overrides."""
        overrides, k = self.overrides, row.optimizer
        cap = overrides.max_lr[k] if k < len(overrides.max_lr) else math.inf
        return min(row.lr * overrides.lr_factor, cap)

    def effective_momentum(self, row: StepMetrics) -> float:
        """The momentum that the step is made with: the loop's, under the overrides."""
        caps = self.overrides.max_momentum
        return min(row.momentum, caps[row.optimizer]) if row.optimizer < len(caps) else row.momentum

    def applied_norm(self, row: StepMetrics) -> float:
        """The norm of the gradients that the optimizer got, after the loop's own clipping."""
        return row.norm if math.isnan(row.applied_norm) else row.applied_norm

    def is_spike(self, row: StepMetrics) -> bool:
        """Whether this row stands out so far that it is left out of the baselines, unless it lasts."""
        if self._checked_row is not row:  # three callers ask about each row
            self._checked_row = row
            thresholds = self.thresholds
            self._checked_is_spike = self.log_norm_ratio(row) > math.log(thresholds.norm_jump_ratio) or (
                self.z(row.loss) > thresholds.loss_jump_sigmas and row.loss > thresholds.loss_jump_ratio * self.loss.max
            )
        return self._checked_is_spike

    def add(self, row: StepMetrics) -> None:
        """Hold an applied row back for a while, and accept the oldest one held back."""
        if not row.applied:
            return
        self.applied_updates += 1
        if row.optimizer == 0:
            self.recent_losses.append(row.loss)
            if len(self._first_losses) < RECENT_ROWS and math.isfinite(row.loss):
                self._first_losses.append(row.loss)
                self.start_loss = sorted(self._first_losses)[len(self._first_losses) // 2]
        if self.is_spike(row):
            self._spikes_in_row += 1
            earlier = [at for at in self._spike_attempts if row.attempt - at < self.thresholds.baseline_rows]
            self._spike_attempts = [*earlier, row.attempt]
            lasts = self._spikes_in_row >= self.thresholds.lasting_steps
            if not lasts and len(self._spike_attempts) <= self.thresholds.max_spikes:
                return  # else it stays, or spikes are so frequent that they are normal for this run
        else:
            self._spikes_in_row = 0
        self._pending.append(row)
        if len(self._pending) > pending_rows(self.applied_updates):
            self._accept(self._pending.popleft())

    def _accept(self, row: StepMetrics) -> None:
        self._checked_row = None
        k, window = row.optimizer, self.thresholds.baseline_rows
        if k == 0:
            self.loss.add(row.attempt, row.loss)
        if row.norm > 0:
            self.log_norms.setdefault(k, Baseline(window)).add(row.attempt, math.log(row.norm))
        if row.applied_norm > 0 or (len(self.log_applied_norms) and k == 0 and row.norm > 0):
            self.log_applied_norms.add(row.attempt, math.log(self.applied_norm(row)))
        if row.lr > 0:
            lrs = self.lrs.setdefault(k, Baseline(self.thresholds.slow_baseline_rows))
            lrs.add(row.attempt, self.effective_lr(row))
        if row.samples > 0:
            self.batch_sizes.add(row.attempt, row.samples)
        if math.isfinite(row.momentum):
            self.momenta[k] = row.momentum

    @property
    def healthy_settings(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Healthy learning rate and momentum of each optimizer; infinite where it has none."""
        count = 1 + max((*self.lrs, *self.momenta), default=-1)
        lrs = tuple(_healthy_lr(self.lrs[k]) if k in self.lrs else math.inf for k in range(count))
        return lrs, tuple(self.momenta.get(k, math.inf) for k in range(count))

    def drop_losses(self) -> None:
        """Forget all losses: they turned out to be no measure of progress."""
        self.loss = Baseline(self.thresholds.baseline_rows)
        self.recent_losses.clear()
        self.start_loss, self._first_losses = math.nan, []
        self._pending = deque(replace(row, loss=math.nan) for row in self._pending)
        self._checked_row = None

    def rewound(self, attempt: int) -> None:
        """The run was rewound to the state after this attempt: drop everything later."""
        baselines = (
            self.loss,
            self.log_applied_norms,
            self.batch_sizes,
            *self.log_norms.values(),
            *self.lrs.values(),
        )
        for baseline in baselines:
            baseline.drop_from(attempt + 1)
        self._checked_row = None
        self._pending.clear()
        self.recent_losses.clear()
        self._spikes_in_row = 0

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
            "landed": self.applied_updates,
            "spikes": self._spikes_in_row,
            "spiked": list(self._spike_attempts),
            "waiting": [_pending_state(row) for row in self._pending],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss.load_state_dict(state["loss"])
        self.log_applied_norms.load_state_dict(state["applied"])
        _load_by_optimizer(self.log_norms, state["norms"], self.thresholds.baseline_rows)
        _load_by_optimizer(self.lrs, state["rates"], self.thresholds.slow_baseline_rows)
        self.momenta = {int(k): momentum for k, momentum in state["momenta"].items()}
        self.batch_sizes.load_state_dict(state["sizes"])
        self.start_loss, self._first_losses = state["start"], list(state["first"])
        self.applied_updates = state["landed"]
        self.recent_losses = deque(state["recent"], maxlen=WINDOW_ROWS)
        self._spikes_in_row, self._spike_attempts = state["spikes"], list(state["spiked"])
        self._pending = deque(StepMetrics(**fields) for fields in state["waiting"])


def _load_by_optimizer(baselines: dict[int, Baseline], state: dict[Any, Any], window: int) -> None:
    baselines.clear()
    for k, values in state.items():
        baselines[int(k)] = Baseline(window)
        baselines[int(k)].load_state_dict(values)


def _healthy_lr(lrs: Baseline) -> float:
    """The last accepted learning rate, or the usual one if that is lower: the lr may have crept up."""
    return min(lrs.last, lrs.median) if len(lrs) else math.inf


def _pending_state(row: StepMetrics) -> dict[str, Any]:
    """The fields of a pending row that are accepted later."""
    names = ("step", "attempt", "time", "optimizer", "loss", "norm", "applied_norm", "lr", "momentum", "samples")
    return {name: getattr(row, name) for name in names}
