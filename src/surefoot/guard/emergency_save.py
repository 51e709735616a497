"""When trouble begins, the last good state in memory goes to the disk: who knows how the trouble ends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from surefoot.actions.action_context import CannotAct
from surefoot.checkpoint.manager import CheckpointManager
from surefoot.checkpoint.snapshots import Snapshot, checkpoint_copy
from surefoot.checkpoint.train_state import TrainState
from surefoot.guard.checkpoint_events import CheckpointEventLog
from surefoot.guard.metrics_reader import MetricsReader
from surefoot.guard.recovery import GATES, Recovery
from surefoot.measure.layout import local

log = logging.getLogger("surefoot")


class EmergencySaver:
    """Emergency checkpoints of one run, other than those at signals; all processes act alike."""

    def __init__(
        self,
        keeping: CheckpointManager,
        whole: TrainState,
        *,
        desk: MetricsReader,
        footing: Recovery,
        herald: CheckpointEventLog,
        gates: str,
    ) -> None:
        self._keeping, self._whole, self._desk, self._footing, self._herald = keeping, whole, desk, footing, herald
        self._gates = gates
        """What a checkpoint calls the memory of the gates."""
        self._quiet = True
        self._wanted = False
        self._held: Snapshot | None = None
        """It is on its way to the disk, and stays in the ring until then."""
        self._stopped = -1

    def row_read(self) -> None:
        """A row was read and judged: has trouble begun with it?"""
        quiet = self._desk.judge.quiet
        self._wanted |= self._quiet and not quiet
        self._quiet = quiet

    def round_ended(self, now: Callable[[], dict[str, Any]], *, free: bool) -> bool:
        """Between two steps; whether a save was begun. `free`: no process is at one; `now`: where the data stands."""
        if self._held is not None and self._keeping.idle:
            self._held.in_use = False
            self._held = None
        if not self._wanted or not free:
            return False
        self._wanted = False
        state = self._newest_good()
        if state is None:
            return False
        self._held, state.in_use = state, True
        copy = checkpoint_copy(state.copy, self._whole, now(), {GATES: self._gates})
        known = {**known_of(self._desk), "rewound": [state.attempt, state.step]}
        self._keeping.save_copy(copy, state.step, state.attempt, known)
        return True

    def _newest_good(self) -> Snapshot | None:
        """The newest good state that every process has, if the disk has none as new."""
        ring, ranks = self._footing.ring, self._herald.rounds.meter.ranks
        if ring is None:
            return None
        ring.verify()
        good = {s.attempt: s for s in ring.snapshots if s.good and s.step > 0}
        try:
            shared = self._footing.shared(sorted(good))
        except CannotAct:
            return None
        state = good[max(shared)] if shared else None
        newer = state is not None and state.step > self._keeping.healthy_step
        return state if ranks.from_first(newer) else None

    def stopped(self, save: Callable[[str], None]) -> None:
        """The judge ends the run: what it is now is saved, unless its weights are beyond use."""
        rounds = self._herald.rounds
        ranks = rounds.meter.ranks
        for block, tag in rounds.arrived(rest=True):
            self._desk.read(block, tag, judged=False)
        if self._desk.step == self._stopped or self._desk.alive < ranks.world:
            return
        self._stopped = self._desk.step
        finite = all(bool(torch.isfinite(local(p.detach())).all()) for p in rounds.layout.params)
        if ranks.shared([int(finite)], 1) != [1]:
            self._herald.tell("failed", "not saved: the weights are not finite; what was saved before is kept")
            return
        try:
            save("emergency")
        except Exception as error:  # the reason for the stop is what the loop must hear
            log.error("surefoot: the stopped run was not saved: %s", error, exc_info=error)


def known_of(desk: MetricsReader) -> dict[str, Any]:
    """What is saved of the guard itself: the judge, the last 100 losses and norms, and the order of the optimizers."""
    return {
        "judge": desk.judge.state_dict(),
        "history": desk.history.state_dict(),
        "order": desk.order.state_dict(),
    }
