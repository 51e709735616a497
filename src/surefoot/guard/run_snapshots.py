"""Takes the snapshots of an attached run, reports where they are, and learns from each row which of them are good."""

from __future__ import annotations

import logging

from surefoot.checkpoint.snapshots import Snapshot, SnapshotRing
from surefoot.checkpoint.train_state import TrainState
from surefoot.guard.context import GuardContext
from surefoot.guard.metrics_reader import MetricsReader
from surefoot.guard.snapshot_interval import SnapshotInterval, agree_on_interval, clock_for
from surefoot.guard.step_pipeline import StepPipeline

log = logging.getLogger("surefoot")


class RunSnapshots:
    """The snapshots that a run can be rewound to, and when the next one is due."""

    def __init__(
        self, context: GuardContext, pipeline: StepPipeline, reader: MetricsReader, train_state: TrainState
    ) -> None:
        policy = context.policy
        self.pipeline = pipeline
        self._reader, self._train_state = reader, train_state
        self.ring: SnapshotRing | None = None
        """None where no snapshots are wanted."""
        if context.snapshot_memory != 0 and not policy.observe:
            self.ring = SnapshotRing(
                train_state,
                size=policy.max_snapshots,
                max_age=policy.snapshot_reach,
                budget_bytes=context.snapshot_memory,
            )
        self.interval = SnapshotInterval(policy, clock_for(pipeline.device))
        self._several_ranks = pipeline.grad_stats.ranks.world_size > 1
        self.last_attempt: int | None = None
        """The attempt after which a snapshot was last taken, or should have been; None before the first forward."""
        self._prepared = False
        """Memory was prepared after the first step, when the optimizers hold all the state they ever will."""
        self._reported_place = ""
        """Where snapshots live, as last reported; "nowhere" if off."""

    def take_initial(self) -> None:
        """Take a snapshot before the first forward pass in training, so that a run can rewind to its very start."""
        snapshot = self._take(self.pipeline.attempt - 1, wait=True)
        if snapshot is not None:
            snapshot.good = True  # there is nothing better

    def before_update(self) -> None:
        """An optimizer is about to step: the weights are about to change."""
        if self.ring is None or not self.ring.watches_updates:
            return
        start = self.interval.now() if self.interval.measures and self.ring.in_transfer else None
        self.ring.before_update()
        if start is not None:
            self.interval.waited(start)

    def row_read(self) -> None:
        """A row was read and judged."""
        ring = self.ring
        if ring is None:
            return
        attempt, proven = self._reader.last_attempt, self._reader.judge.proven
        newly_good = False
        for snapshot in ring.snapshots:
            if snapshot.attempt == attempt:
                snapshot.step = self._reader.step  # only now it is known which updates were applied
            newly_good |= not snapshot.good and snapshot.attempt <= proven
        if newly_good:
            ring.mark_good(proven)
        latest = self._reader.latest
        proposing = self.interval.measures and latest is not None and self.interval.row_read(latest, ring.size)
        if self._several_ranks:
            changed = agree_on_interval(self.interval, ring, self.pipeline, self._reader)
        else:
            changed = proposing and self.interval.agree(self.interval.proposed)
        if changed:
            self._report_place(ring)

    def take_if_due(self) -> None:
        """At the end of an iteration: take a snapshot if one is due and no incident is open."""
        if self.ring is not None and not self._prepared:
            self._prepared = True
            self.ring.preallocate()
            self._report(self.ring)
        due_since = self.pipeline.attempt - self.interval.updates
        if self._reader.judge.quiet and (self.last_attempt is None or self.last_attempt <= due_since):
            self._take(self.pipeline.attempt, wait=False)

    def withdraw(self, attempt: int) -> None:
        """This attempt did not end an iteration after all: distrust a snapshot taken after it."""
        if self.ring is not None:
            self.ring.drop_unproven_after(attempt - 1)
        if self.last_attempt == attempt:
            self.last_attempt = attempt - self.interval.updates

    def _take(self, attempt: int, *, wait: bool) -> Snapshot | None:
        """All ranks take snapshots at the same attempts: a rank whose memory is not ready leaves this one out."""
        self.last_attempt = attempt
        if self.ring is None or self.ring.disabled_reason is not None:
            return None
        self._train_state.scaler = self.pipeline.scaler
        start = self.interval.now() if self.interval.measures and not wait else None
        snapshot = self.ring.take(attempt, self._reader.step, wait=wait)
        if start is not None:
            self.interval.snapshot_taken(snapshot, start)
        self._report(self.ring)
        return snapshot

    # -- reports

    def report_messages(self) -> None:
        if self.ring is not None and self.ring.messages:
            self._report(self.ring)

    def _report(self, ring: SnapshotRing) -> None:
        """Write the ring's messages to the journal, and where snapshots live if that has changed."""
        messages, ring.messages = ring.messages, []
        for message in messages:
            self._reader.note("ring", message, attempt=self.pipeline.attempt)
            if self._reader.journal.rank == 0:
                log.info("surefoot: %s", message)
        place = ring.location if ring.disabled_reason is None else "nowhere"
        if place != self._reported_place:
            self._reported_place = place
            self._report_place(ring)
            if ring.disabled_reason is not None:
                log.warning("surefoot: the run cannot be rewound if it has to be: %s", ring.describe())

    def _report_place(self, ring: SnapshotRing) -> None:
        """Write to the journal where snapshots are, and how often one is taken."""
        often = "" if ring.disabled_reason is not None else f"; {self.interval.describe()}"
        self._reader.note("ring", f"{ring.describe()}{often}", attempt=self.pipeline.attempt)
