"""The checkpoints of a live run: when one is due, what became of it, whether it proved good, and the way back."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from surefoot.checkpoint.copies import Copy
from surefoot.checkpoint.format.hashing import hash_of
from surefoot.checkpoint.format.load import put_together
from surefoot.checkpoint.health_marks import HealthMarks
from surefoot.checkpoint.pending_save import EarlierState, Outcome, PendingSave
from surefoot.checkpoint.rank_rendezvous import RankGroup, forget, part
from surefoot.checkpoint.replay_check import Proof, ReplayCheck
from surefoot.checkpoint.save_interval import SaveInterval
from surefoot.checkpoint.saver import AsyncSaver
from surefoot.checkpoint.store import Retention, Store, StoredCheckpoint
from surefoot.checkpoint.train_state import TrainState

PATIENCE = 300.0
"""Seconds for which a disk may not answer before that is told, and nobody waits for it any more."""
_POLL = 0.002
_BUSY = "the save before was still under way"
Tell = Callable[[str, str, Mapping[str, Any]], None]
"""Takes the name of what happened, the words, and the values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A run that was put back on the disk's word."""

    step: int
    attempt: int
    checkpoint: str
    guard: Any
    """What was saved beside the run."""
    equal: bool | None
    """Whether the state hashes to what was saved, to the bit; None where another number of processes saved it."""
    proof: Proof | None = None
    """Whether a saved batch has the loss it had."""
    notes: tuple[str, ...] = ()


class CheckpointManager:
    """Saves a run as it goes, one checkpoint after the other, and finds the right one to go on from."""

    def __init__(
        self,
        root: Path,
        whole: TrainState,
        *,
        tell: Tell,
        team: RankGroup | None = None,
        pace: SaveInterval | None = None,
        keep: Retention | None = None,
        about: Mapping[str, Any] | None = None,
        probe: ReplayCheck | None = None,
    ) -> None:
        self.team = team or RankGroup()
        self.pace = pace or SaveInterval()
        self.store = Store(root, keep=keep, patience=PATIENCE)
        self.metrics: dict[str, float | torch.Tensor] = {}
        """The latest of each, to be told with the next checkpoint."""
        self._saving = AsyncSaver(whole, self.store, self.team, probe=probe)
        self._whole = whole
        self._tell = tell
        self._about = {"versions": {"torch": torch.__version__, "python": platform.python_version()}, **(about or {})}
        self._began = time.monotonic()
        self._taken: PendingSave | None = None
        """Copied, and waiting for the numbers of its last update."""
        self._health = HealthMarks(self.store, self._saving.behind, first=self.team.rank == 0)
        self._saved = -1
        self._doubted = False
        self._silent = False
        """It was told that the disk does not answer."""

    # -- step by step

    @property
    def saved_step(self) -> int:
        """The step of the last save that was begun; -1 before the first."""
        return self._saved

    @property
    def sound_step(self) -> int:
        """The step of the newest checkpoint that proved healthy, as the first process knows it; -1 for none."""
        return self._health.sound

    @property
    def idle(self) -> bool:
        """Neither a copy waits nor a save is under way."""
        return self._taken is None and not self._saving.busy

    def settle(self) -> None:
        self._saving.settle()

    def prepare(self) -> None:
        """The optimizers hold all they ever will: memory for the copies can be made."""
        self._saving.prepare()

    def due(self, step: int, *, free: bool = True) -> bool:
        """Whether a checkpoint is wanted now; `step` counts the updates that are known to have landed.

        One that falls due while a save is under way is wanted as soon as that has ended. Several processes must all
        come to the same answer: `free` is what all of them know, that none is at a save.
        """
        self.heard()
        if not self.pace.due(step):
            return False
        if self.team.world == 1:
            return self.idle
        if free:
            self.pace.done(step)
        return free

    def missed(self) -> None:
        """The moment was not the right one: the next will do."""
        self.pace.hurry()

    def take(self, attempt: int, earlier: EarlierState | None = None) -> None:
        """Copy the run as it is between two updates; it is written when the numbers of the last one are known."""
        if not self.idle:
            self._saving.absent(_BUSY)
            self._tell("failed", f"not saved: {_BUSY}; tried again at the next interval", {})
            return
        self._taken = self._saving.take(attempt, earlier=earlier)

    def withdraw(self, attempt: int) -> None:
        """A copy taken after this attempt and not written yet is from the middle of an iteration: the next will do."""
        if self._taken is not None and self._taken.attempt == attempt:
            self._drop()
            self.missed()

    def row_read(self, step: int, attempt: int, guard: Callable[[], Any]) -> None:
        """The numbers up to an attempt are known, and with them how many updates have landed."""
        taken = self._taken
        if taken is None or attempt < taken.attempt:
            return
        self._taken = None
        if self._doubted or attempt > taken.attempt:
            self._saving.forget(taken)
            self._doubted = False
            return
        self._begin(taken, step, guard())

    def save(
        self, step: int, attempt: int, guard: Any, *, kind: str = "regular", earlier: EarlierState | None = None
    ) -> Outcome | None:
        """Save now and wait for it; what is under way is waited for too. The last outcome, for the first process."""
        self._drop()
        self.heard(wait=True)
        if not self.idle:
            self._saving.absent(_BUSY)
            return None
        taken = self._saving.take(attempt, kind=kind, earlier=earlier)
        self._begin(taken, step, guard)
        return self.heard(wait=True)

    def lend(self, copy: Copy, step: int, attempt: int, guard: Any) -> None:
        """Have a state written that is kept in memory, as an emergency checkpoint; nobody waits for it."""
        self._saving.write(self._saving.lend(copy, attempt), step, self._said(), guard)

    def _begin(self, taken: PendingSave, step: int, guard: Any) -> None:
        self._saving.write(taken, step, self._said(), guard)
        if self.team.world == 1:
            self.pace.done(step)
        self._saved = step

    def heard(self, *, wait: bool = False, until: float = math.inf) -> Outcome | None:
        """Tell what came of the save, if it is over."""
        while self._health.troubles:
            self._tell("trouble", self._health.troubles.pop(), {})
        outcome = self._saving.outcome(wait=wait, patience=PATIENCE, until=until)
        if outcome is None:
            self._tell_of_silence()
            return None
        self._silent = False
        values = {"step": outcome.step, "kind": outcome.kind, "seconds": round(outcome.seconds, 3)}
        if outcome.error:
            self._saved = -1
            self._tell("failed", f"not saved: {outcome.error}; tried again at the next interval", values)
        elif outcome.kept is not None:
            name = outcome.kept.name
            self._health.saved(name, outcome.attempt, outcome.step)
            told = values | {"name": name, "bytes": outcome.kept.size, "removed": list(outcome.removed)}
            if outcome.probe is not None:
                told["probe_seconds"] = round(outcome.probe, 4)
            self._tell("saved", f"saved as {name}", told)
        if outcome.left_out:
            self._tell("left_out", f"cannot be saved: {', '.join(outcome.left_out[:5])}", {})
        if outcome.trouble:
            self._tell("trouble", outcome.trouble, {})
        self._health.mark()
        return outcome

    def _tell_of_silence(self) -> None:
        silent = self._saving.pulse.silent
        if silent > PATIENCE and not self._silent:
            self._silent = True
            self._tell("failed", f"not saved: the disk has not answered for {silent:.0f} s", {})

    # -- health

    def prove(self, attempt: int) -> None:
        """States of this attempt and before proved good by what followed."""
        self._health.prove(attempt)

    def doubt(self, attempt: int, why: str) -> None:
        """What was taken after this attempt may hold the trouble."""
        if self._taken is not None and self._taken.attempt > attempt:
            self._doubted = True
        self._health.doubt(attempt, why)

    # -- the way back

    def newest(self) -> StoredCheckpoint | None:
        """The checkpoint to go on from, verified; None where there is none. Raises NothingWhole."""
        return self.store.newest()

    def clean(self) -> None:
        """Remove what a killed process left behind; only for who holds the run."""
        self.store.clean(alone=True)
        forget(self.store.root)

    def resume(self, kept: StoredCheckpoint) -> Resumed:
        """Put the run back to what a checkpoint holds, and prove it: what is there now hashes to what was there."""
        names = self._saving.names()
        restored = put_together(kept.folder, self._whole, names, rank=self.team.rank, world_size=self.team.world)
        equal = hash_of(self._whole.look(), names) == restored.hash if restored.hash else None
        probe = self._saving.probe
        proof = None if probe is None else probe.prove(restored.probe, same_world=equal is not None)
        self.pace.done(kept.step)
        self._saved = self._health.sound = kept.step
        return Resumed(
            step=kept.step,
            attempt=kept.attempt,
            checkpoint=kept.name,
            guard=restored.guard,
            equal=equal,
            proof=proof,
            notes=(*kept.passed, *restored.notes),
        )

    def close(self, *, wait: float = math.inf) -> None:
        """Wait for what is under way, and no longer than this."""
        self._drop()
        until = time.monotonic() + min(wait, PATIENCE)
        self.heard(wait=True, until=math.inf if wait == math.inf else until)
        while self._health.busy and time.monotonic() < until:
            time.sleep(_POLL)
        self.heard()
        part(self.store.root, self.team)

    def _drop(self) -> None:
        if self._taken is not None:
            self._saving.forget(self._taken)
            self._taken = None

    def _said(self) -> dict[str, Any]:
        trained = time.monotonic() - self._began
        return {**self._about, "metrics": dict(self.metrics), "seconds": round(trained, 3)}
