"""Emergency checkpoints: the newest good snapshot is written to disk when an incident begins, and the run when it is
stopped."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from surefoot.actions.action_context import CannotAct
from surefoot.checkpoint.manager import CheckpointManager
from surefoot.checkpoint.snapshots import Snapshot, checkpoint_copy
from surefoot.checkpoint.train_state import TrainState
from surefoot.guard.metrics_reader import CheckpointEventLog, MetricsReader
from surefoot.guard.recovery import Recovery
from surefoot.measure.layout import to_local

log = logging.getLogger("surefoot")


class EmergencySaver:
    """Emergency checkpoints other than those at signals; all ranks act alike."""

    def __init__(
        self,
        manager: CheckpointManager,
        train_state: TrainState,
        *,
        events: CheckpointEventLog,
        reader: MetricsReader,
        recovery: Recovery,
    ) -> None:
        self._manager, self._train_state = manager, train_state
        self._events, self._reader, self._recovery = events, reader, recovery
        self.quiet = True
        """Whether the judge was quiet when the last row was read."""
        self.save_wanted = False
        self.saving: Snapshot | None = None
        """The snapshot being written to disk; it stays in memory until then."""
        self._stopped_step = -1

    def quiet_changed(self, quiet: bool) -> None:
        """An incident has begun or ended: when it begins, ask for a save."""
        self.quiet = quiet
        self.save_wanted |= not quiet

    def iteration_ended(self, loader_state: Callable[[], dict[str, Any]], *, no_save_running: bool) -> bool:
        """Begin a save if one is wanted and no rank is writing; returns whether one began."""
        if self.saving is not None and self._manager.idle:
            self.saving.in_use = False
            self.saving = None
        if not self.save_wanted or not no_save_running:
            return False
        self.save_wanted = False
        snapshot = self._newest_good()
        if snapshot is None:
            return False
        self.saving, snapshot.in_use = snapshot, True
        copy = checkpoint_copy(snapshot.copy, self._train_state, loader_state(), {})
        state = {**self._reader.state_dict(), "rewound": [snapshot.attempt, snapshot.step]}
        self._manager.save_copy(copy, snapshot.step, snapshot.attempt, state)
        return True

    def _newest_good(self) -> Snapshot | None:
        """The newest good snapshot that every rank has, if it is newer than what is on disk."""
        ring, ranks = self._recovery.ring, self._events.pipeline.grad_stats.ranks
        if ring is None:
            return None
        ring.verify()
        good = {s.attempt: s for s in ring.snapshots if s.good and s.step > 0}
        try:
            shared = self._recovery.common_attempts(sorted(good))
        except CannotAct:
            return None
        snapshot = good[max(shared)] if shared else None
        newer = snapshot is not None and snapshot.step > self._manager.healthy_step
        return snapshot if ranks.broadcast(newer) else None

    def before_stop(self, save: Callable[[str], None]) -> None:
        """The judge stops the run: save it as it is now, unless its weights are not finite."""
        pipeline = self._events.pipeline
        ranks = pipeline.grad_stats.ranks
        self._reader.drain(pipeline, judge=False)
        if self._reader.step == self._stopped_step or self._reader.ranks_alive < ranks.world_size:
            return
        self._stopped_step = self._reader.step
        finite = all(bool(torch.isfinite(to_local(p.detach())).all()) for p in pipeline.layout.params)
        if ranks.intersect([int(finite)], 1) != [1]:
            self._events.record("failed", "not saved: the weights are not finite; earlier checkpoints are kept")
            return
        try:
            save("emergency")
        except Exception as error:  # the loop must get the reason for the stop, not this
            log.error("surefoot: the stopped run was not saved: %s", error, exc_info=error)
