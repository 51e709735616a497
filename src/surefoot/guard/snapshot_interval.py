"""How many updates apart snapshots are taken: as few as a share of the time of training allows."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from typing import Any, Protocol

import torch

from surefoot.checkpoint.snapshots import Snapshot, SnapshotRing
from surefoot.guard.metrics_reader import MetricsReader
from surefoot.guard.step_pipeline import StepPipeline
from surefoot.judge.policy import Policy
from surefoot.measure.block_layout import LAG, SharedSlot
from surefoot.records import NAN, StepMetrics

LADDER = (5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50)
"""The intervals that may be chosen: few, so that noise in the times rarely changes it, and none so long that a rewind
loses very much, whatever a snapshot costs."""
FIRST_INTERVAL = 10
"""Used until two snapshots into memory that was used before have been measured: no more than a ring full of them and
three. Touching memory for the first time takes several times as long, but happens only once."""
INTERVAL_OF_TWO = LADDER[-1]
"""With room for two snapshots: the older of them is all that a run can be rewound to."""
MIN_COSTS, MAX_COSTS = 2, 5
"""Snapshots that are measured before an interval is chosen, and the newest that count later."""
MIN_STEPS, MAX_STEPS = 8, 32
"""The same for steps."""
CLEARLY_SHORTER = 1.25
"""A shorter interval is chosen only where a cost higher by this factor would allow it, too."""
REPORTED_CHANGE = 2
"""The factor by which an interval must change to be reported again."""


class Clock(Protocol):
    """Tells the time at which training gets to where it is now."""

    def now(self) -> Any: ...

    def seconds(self, start: Any, end: Any) -> float | None:
        """The time between two moments; None while it is not known yet."""
        ...


class HostClock:
    """The time on the host, where nothing runs behind it."""

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float | None:
        return end - start


class CudaClock:
    """The time on the device, at which the work queued so far is done: host work that it hides costs nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        return start.elapsed_time(end) / 1e3 if start.query() and end.query() else None


def clock_for(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else HostClock()


class SnapshotInterval:
    """The updates between two snapshots: those of the policy, or chosen by what a snapshot costs.

    Each rank says which interval it would choose, with the numbers that the ranks exchange in every step anyway; all
    take the longest when they read those numbers, which they do at the same attempt.
    """

    def __init__(self, policy: Policy, clock: Clock) -> None:
        self._share = policy.snapshot_time_share
        self._settle_rows = policy.healthy_steps_to_trust + LAG
        """Updates until a snapshot may be known to be good."""
        self.measures = policy.snapshot_every is None
        """Its length is chosen by what a snapshot costs."""
        self.updates = FIRST_INTERVAL if policy.snapshot_every is None else policy.snapshot_every
        """Updates between two snapshots, the same on all ranks."""
        self.proposed = NAN
        """What this rank would choose; NaN while it does not know, or where the policy says."""
        self.agreed = not self.measures
        """The interval is no first guess any more."""
        self._reported = 0
        self._clock = clock
        self._measuring: tuple[int, bool, list[tuple[Any, Any]]] | None = None
        """A snapshot whose cost is not known yet: its attempt, whether memory was allocated for it, and the pieces of
        time in which training waited for it."""
        self._measured = 0
        """Snapshots that were measured."""
        self._costs: deque[tuple[float, bool]] = deque(maxlen=MAX_COSTS)
        """Seconds that training waited for each of the last snapshots, and whether memory was allocated for it."""
        self._steps: deque[float] = deque(maxlen=MAX_STEPS)
        """Seconds of the last attempts."""
        self._last_attempt = -1

    # -- what a snapshot costs

    def now(self) -> Any:
        return self._clock.now()

    def snapshot_taken(self, snapshot: Snapshot | None, start: Any) -> None:
        """A snapshot was taken since this moment; None if there was no memory for it."""
        if snapshot is not None and self.measures:
            self._measuring = snapshot.attempt, snapshot.allocated, [(start, self._clock.now())]

    def waited(self, start: Any) -> None:
        """The next step has waited for the snapshot's transfer since this moment."""
        if self._measuring is not None:
            self._measuring[2].append((start, self._clock.now()))

    # -- the interval

    def row_read(self, row: StepMetrics, ring_size: int) -> bool:
        """A row was read: note how long the attempt took, and propose an interval once enough is known; returns
        whether it has just done so."""
        if row.attempt != self._last_attempt:
            self._steps.append(row.seconds)
        else:  # of another optimizer that has stepped on the same backward
            self._steps[-1] += row.seconds
        self._last_attempt = row.attempt
        if self._measuring is None or row.attempt <= self._measuring[0]:
            return False
        seconds = [self._clock.seconds(start, end) for start, end in self._measuring[2]]
        known = [s for s in seconds if s is not None]
        if len(known) < len(seconds):
            return False
        self._costs.append((sum(known), self._measuring[1]))
        self._measured += 1
        self._measuring = None
        return self._propose(ring_size)

    def _propose(self, ring_size: int) -> bool:
        step = self.step_seconds
        reused = sum(not allocated for _, allocated in self._costs)
        never_reused = not reused and self._measured > ring_size + MIN_COSTS
        if (reused < MIN_COSTS and not never_reused) or math.isnan(step):
            return False
        needed = math.inf if step <= 0 else self.cost_seconds / (self._share * step)
        least = shortest_interval(ring_size, self._settle_rows)
        chosen = _round_up(max(needed, least))
        current = self.proposed
        if not chosen < current or _round_up(max(CLEARLY_SHORTER * needed, least)) < current:
            self.proposed = float(chosen)
        return True

    def agree(self, proposed: float) -> bool:
        """Take the longest interval that a rank has proposed, NaN if none has; returns whether it is to be reported:
        the first one, and then each that differs a lot from the last one reported."""
        if not self.measures or not proposed >= 1:
            return False
        self.updates, self.agreed = int(proposed), True
        low, high = sorted((self.updates, self._reported))
        if high < REPORTED_CHANGE * low:
            return False
        self._reported = self.updates
        return True

    # -- in words

    @property
    def cost_seconds(self) -> float:
        """What a snapshot costs, in memory that was used before where that is known; NaN before any was measured."""
        reused = [seconds for seconds, allocated in self._costs if not allocated]
        costs = reused or [seconds for seconds, _ in self._costs]
        return statistics.median_low(costs) if costs else NAN

    @property
    def step_seconds(self) -> float:
        """How long an attempt takes; NaN before enough were measured."""
        steps = [seconds for seconds in self._steps if math.isfinite(seconds)]
        return statistics.median(steps) if len(steps) >= MIN_STEPS else NAN

    @property
    def time_share(self) -> float:
        """The share of the time of training that snapshots take; NaN where it is not measured."""
        return self.cost_seconds / (self.updates * self.step_seconds)

    def describe(self) -> str:
        every = f"a snapshot every {self.updates} updates"
        if not self.measures:
            return f"{every} (Policy.snapshot_every)"
        if not self.agreed:
            return f"{every} until it is known what one costs"
        if math.isnan(self.time_share):
            return every
        cost, step = _milliseconds(self.cost_seconds), _milliseconds(self.step_seconds)
        return f"{every}: one takes {cost}, an update {step}, which makes {100 * self.time_share:.2g} % of the time"


def agree_on_interval(
    interval: SnapshotInterval, ring: SnapshotRing, pipeline: StepPipeline, reader: MetricsReader
) -> bool:
    """With several ranks, after a row was read: propose an interval and a number of snapshots to the others, and take
    what all have agreed on by that row; returns whether the interval is to be reported."""
    pipeline.proposals[SharedSlot.SNAPSHOT_INTERVAL] = interval.proposed
    pipeline.proposals[SharedSlot.SNAPSHOT_ROOM] = ring.size if ring.disabled_reason is None else NAN
    ring.limit(reader.snapshot_room)
    return interval.agree(reader.snapshot_interval)


def shortest_interval(ring_size: int, settle_rows: int) -> int:
    """The interval from which on snapshots that are not proven to be good yet take half of the room at most, beside
    one for the newest good one and one for the oldest."""
    for_unproven = (ring_size - 1) // 2
    return INTERVAL_OF_TWO if for_unproven < 1 else math.ceil((settle_rows + 1) / for_unproven)


def _round_up(interval: float) -> int:
    return next((step for step in LADDER if step >= interval), LADDER[-1])


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
