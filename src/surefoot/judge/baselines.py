"""What is normal for this run: robust baselines over accepted values, which the trouble being judged never enters."""

from __future__ import annotations

import bisect
import math
from collections import deque
from dataclasses import replace
from typing import Any

from surefoot.judge.policy import DOUBLE, FEW, SMALL, WHILE, Thresholds
from surefoot.records import StepMetrics, StepOverrides


def held_back(known: int) -> int:
    """Values that are being judged, and no part of what is normal yet, where so many are known; few at first."""
    return min(WHILE, 1 + known // 4)


class Baseline:
    """The last accepted values, kept in order of size too, so that their middle and spread cost nothing."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._values: deque[tuple[int, float]] = deque()
        self._sorted: list[float] = []
        self._spread = math.nan
        """As it was last asked for; 0 when that was before the last change."""

    def __len__(self) -> int:
        return len(self._values)

    def add(self, attempt: int, value: float) -> None:
        if not math.isfinite(value):
            return
        self._values.append((attempt, value))
        bisect.insort(self._sorted, value)
        if len(self._values) > self._window:
            self._drop(self._values.popleft()[1])
        self._spread = 0.0

    def forget(self, attempt: int) -> None:
        """Values from this attempt on were none of the run's after all."""
        while self._values and self._values[-1][0] >= attempt:
            self._drop(self._values.pop()[1])
        self._spread = 0.0

    def before(self, attempt: int) -> Baseline:
        """What was known before an attempt; all that is known, where that is too little to go by."""
        kept = Baseline(self._window)
        kept.load_state_dict({"values": [pair for pair in self._values if pair[0] < attempt]})
        return kept if len(kept) >= min(WHILE // 2, len(self)) else self

    def _drop(self, value: float) -> None:
        self._sorted.pop(bisect.bisect_left(self._sorted, value))

    @property
    def middle(self) -> float:
        return self._sorted[round(0.5 * (len(self._sorted) - 1))] if self._sorted else math.nan

    @property
    def top(self) -> float:
        return self._sorted[-1] if self._sorted else math.nan

    @property
    def spread(self) -> float:
        """A standard deviation, were the values normally distributed; never quite zero."""
        if not self._sorted:
            return math.nan
        if not self._spread:
            width = (self.quantile(0.75) - self.quantile(0.25)) / 1.349
            self._spread = max(width, 1e-3 * abs(self.middle), 1e-30)
        return self._spread

    def quantile(self, share: float) -> float:
        return self._sorted[round(share * (len(self._sorted) - 1))] if self._sorted else math.nan

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
        self._spread = 0.0


class Baselines:
    """Baselines of the loss and of each optimizer's gradient norm, and the rows that are being judged against them."""

    def __init__(self, sight: Thresholds, *, contested: bool = False) -> None:
        self.sight = sight
        self.contested = contested
        """The loss depends on what other optimizers do in turn, as a generator's does on its critic: that it rises, or
        does not fall, is no harm by itself."""
        self.loss = Baseline(sight.window)
        self.norms: dict[int, Baseline] = {}
        """Of the logarithms of the norms."""
        self.rates: dict[int, Baseline] = {}
        self.momenta: dict[int, float] = {}
        """What momentum was when things were well."""
        self.applied = Baseline(sight.window)
        """Of the logarithms of the norms that the first optimizer was handed, where the loop changes gradients."""
        self.asked = StepOverrides()
        """What is asked of the steps."""
        self.judges_loss = True
        """Whether these are baselines of the loss itself, and not of another measure of progress."""
        self.sizes = Baseline(sight.window)
        """Of the samples in a batch."""
        self.wider = 1.0
        """How many times further than usual losses scatter now, since a batch has fewer samples than it had."""
        self.start = math.nan
        """The level the loss began at."""
        self.recent: deque[float] = deque(maxlen=WHILE)
        """The last losses that landed, finite or not."""
        self.landed = 0
        self._first: list[float] = []
        self._waiting: deque[StepMetrics] = deque()
        self._looked_at: StepMetrics | None = None
        """The row that was last asked about, and whether it stands out."""
        self._stands_out = False
        self._spikes = 0
        self._spiked: list[int] = []

    @property
    def first(self) -> float:
        """The very first loss."""
        return self._first[0] if self._first else math.nan

    @property
    def formed(self) -> bool:
        return len(self.loss) >= self.sight.least

    @property
    def bounds_loss(self) -> bool:
        """Whether a ceiling for the loss can be derived from what is normal."""
        return self.formed and self.judges_loss and not self.contested

    @property
    def samples(self) -> float:
        """Samples in a batch, usually."""
        return self.sizes.middle if len(self.sizes) else math.nan

    def expect(self, row: StepMetrics) -> None:
        """A mean over fewer samples scatters further, by the root of how many fewer they are, until next to all that is
        known comes from such batches."""
        fewer = self.sizes.quantile(1 - SMALL) / row.samples if row.samples > 0 else math.nan
        self.wider = math.sqrt(fewer) if fewer >= DOUBLE else 1.0

    @property
    def raised(self) -> float:
        """Deviations above normal from which a loss is higher than it should be."""
        return self.sight.far if self.contested else self.sight.raised

    def z(self, loss: float) -> float:
        """How many deviations a loss lies above what is normal."""
        return (loss - self.loss.middle) / (self.wider * self.loss.spread) if self.formed else math.nan

    def norm_ratio(self, row: StepMetrics) -> float:
        """The norm over the largest accepted one lately, as a logarithm."""
        known = self.norms.get(row.optimizer)
        if known is None or len(known) < self.sight.least or not row.norm > 0:
            return math.nan
        return math.log(row.norm / self.wider) - known.top if math.isfinite(row.norm) else math.inf

    def norm_z(self, row: StepMetrics) -> float:
        known = self.norms.get(row.optimizer)
        if known is None or len(known) < self.sight.least or not row.norm > 0:
            return math.nan
        return (math.log(row.norm) - known.middle) / max(known.spread, SMALL) if math.isfinite(row.norm) else math.inf

    def rate_ratio(self, row: StepMetrics) -> float:
        """The rate over what it usually was."""
        known = self.rates.get(row.optimizer)
        return self.rate(row) / known.middle if known is not None and len(known) and known.middle > 0 else math.nan

    def rate(self, row: StepMetrics) -> float:
        """The rate that a step is made with, whatever the loop has set."""
        asked, k = self.asked, row.optimizer
        return min(row.lr * asked.lr_factor, asked.max_lr[k] if k < len(asked.max_lr) else math.inf)

    def momentum(self, row: StepMetrics) -> float:
        """The same for the momentum."""
        caps = self.asked.max_momentum
        return min(row.momentum, caps[row.optimizer]) if row.optimizer < len(caps) else row.momentum

    def handed(self, row: StepMetrics) -> float:
        """The norm of the gradients that the optimizer was handed, after whatever the loop did to them."""
        return row.norm if math.isnan(row.applied_norm) else row.applied_norm

    def spikes(self, row: StepMetrics) -> bool:
        """Whether this value stands out so far that it is no part of what is normal, unless it stays."""
        if self._looked_at is not row:  # three ask of each row
            self._looked_at = row
            self._stands_out = self.norm_ratio(row) > math.log(self.sight.jump) or (
                self.z(row.loss) > self.sight.far and row.loss > self.sight.above * self.loss.top
            )
        return self._stands_out

    def take(self, row: StepMetrics) -> None:
        """Hold a row that landed back for a while, and take in the one whose time has come."""
        if not row.applied:
            return
        self.landed += 1
        if row.optimizer == 0:
            self.recent.append(row.loss)
            if len(self._first) < FEW and math.isfinite(row.loss):
                self._first.append(row.loss)
                self.start = sorted(self._first)[len(self._first) // 2]
        if self.spikes(row):
            self._spikes += 1
            self._spiked = [at for at in self._spiked if row.attempt - at < self.sight.window] + [row.attempt]
            if self._spikes < self.sight.lasting and len(self._spiked) <= self.sight.usual:
                return  # unless it stays, or comes so often that it is what this run is like
        else:
            self._spikes = 0
        self._waiting.append(row)
        if len(self._waiting) > held_back(self.landed):
            self._accept(self._waiting.popleft())

    def _accept(self, row: StepMetrics) -> None:
        self._looked_at = None
        if row.optimizer == 0:
            self.loss.add(row.attempt, row.loss)
        if row.norm > 0:
            self.norms.setdefault(row.optimizer, Baseline(self.sight.window)).add(row.attempt, math.log(row.norm))
        if row.applied_norm > 0 or (len(self.applied) and row.optimizer == 0 and row.norm > 0):
            self.applied.add(row.attempt, math.log(self.handed(row)))
        if row.lr > 0:
            self.rates.setdefault(row.optimizer, Baseline(self.sight.slow_window)).add(row.attempt, self.rate(row))
        if row.samples > 0:
            self.sizes.add(row.attempt, row.samples)
        if math.isfinite(row.momentum):
            self.momenta[row.optimizer] = row.momentum

    @property
    def settings(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Rate and momentum of each optimizer when things were well; infinite where it has none."""
        count = 1 + max((*self.rates, *self.momenta), default=-1)
        rates = tuple(_least(self.rates[k]) if k in self.rates else math.inf for k in range(count))
        return rates, tuple(self.momenta.get(k, math.inf) for k in range(count))

    def forget_losses(self) -> None:
        """The losses known so far are no measure of progress."""
        self.loss = Baseline(self.sight.window)
        self.recent.clear()
        self.start, self._first = math.nan, []
        self._waiting = deque(replace(row, loss=math.nan) for row in self._waiting)
        self._looked_at = None

    def rewound(self, attempt: int) -> None:
        """What came after this attempt did not happen."""
        for known in (self.loss, self.applied, self.sizes, *self.norms.values(), *self.rates.values()):
            known.forget(attempt + 1)
        self._looked_at = None
        self._waiting.clear()
        self.recent.clear()
        self._spikes = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "loss": self.loss.state_dict(),
            "applied": self.applied.state_dict(),
            "norms": {k: b.state_dict() for k, b in self.norms.items()},
            "rates": {k: b.state_dict() for k, b in self.rates.items()},
            "momenta": dict(self.momenta),
            "start": self.start,
            "sizes": self.sizes.state_dict(),
            "first": list(self._first),
            "recent": list(self.recent),
            "landed": self.landed,
            "spikes": self._spikes,
            "spiked": list(self._spiked),
            "waiting": [_packed(row) for row in self._waiting],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss.load_state_dict(state["loss"])
        self.applied.load_state_dict(state["applied"])
        windows = self.sight.window, self.sight.slow_window
        for kept, held, window in zip((self.norms, self.rates), (state["norms"], state["rates"]), windows, strict=True):
            kept.clear()
            for k, content in held.items():
                kept[int(k)] = Baseline(window)
                kept[int(k)].load_state_dict(content)
        self.momenta = {int(k): m for k, m in state["momenta"].items()}
        self.sizes.load_state_dict(state["sizes"])
        self.start, self._first, self.landed = state["start"], list(state["first"]), state["landed"]
        self.recent = deque(state["recent"], maxlen=WHILE)
        self._spikes, self._spiked = state["spikes"], list(state["spiked"])
        self._waiting = deque(StepMetrics(**content) for content in state["waiting"])


def _least(rates: Baseline) -> float:
    """The last rate that was accepted, or the usual one if that was lower: a rate may have crept up."""
    return min(rates.last, rates.middle) if len(rates) else math.inf


def _packed(row: StepMetrics) -> dict[str, Any]:
    """What of a row is taken in later."""
    names = ("step", "attempt", "time", "optimizer", "loss", "norm", "applied_norm", "lr", "momentum", "samples")
    return {name: getattr(row, name) for name in names}
