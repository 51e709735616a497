"""The checkpoints of a live run: when to save, the results of saves, health marks, and resuming."""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from surefoot.background import BackgroundTask
from surefoot.checkpoint.copies import StateCopy
from surefoot.checkpoint.format.hashing import hash_state
from surefoot.checkpoint.format.load_checkpoint import load_checkpoint
from surefoot.checkpoint.rank_rendezvous import RankGroup, leave, remove_messages
from surefoot.checkpoint.replay_check import ReplayCheck, ReplayResult
from surefoot.checkpoint.rng import EarlierState
from surefoot.checkpoint.saver import AsyncSaver, PendingSave, SaveResult
from surefoot.checkpoint.store import CheckpointStore, Retention, SaveFailed, StoredCheckpoint
from surefoot.checkpoint.train_state import TrainState

STALL_TIMEOUT = 300.0
"""Seconds for which a disk call may hang before that is reported and no longer waited for."""
_POLL = 0.002
_BUSY = "the previous save was still running"
EventCallback = Callable[[str, str, Mapping[str, Any]], None]
"""Called with the name of an event, a message, and values."""


@dataclass(slots=True)
class SaveInterval:
    """When a save is due, by the number of updates and by a monotonic clock."""

    steps: int = 1000
    seconds: float = 3600.0
    """The longest time between two saves, by a monotonic clock."""
    _step: int = -1
    _time: float = field(default_factory=time.monotonic)
    _requested: bool = False

    def due(self, step: int) -> bool:
        if self._step < 0:
            self._step = step
        return self._requested or step - self._step >= self.steps or time.monotonic() - self._time >= self.seconds

    def overdue(self, step: int) -> bool:
        """A second interval has passed; by the step count alone, which all ranks share."""
        return self._step >= 0 and step - self._step >= 2 * self.steps

    def request(self) -> None:
        """Make a save due at once."""
        self._requested = True

    def reset(self, step: int) -> None:
        """A save was made at `step`."""
        self._step, self._time, self._requested = step, time.monotonic(), False


class HealthMarks:
    """Marks checkpoints healthy or suspect by what followed them; rank 0 writes the marks in the background."""

    def __init__(
        self,
        store: CheckpointStore,
        run_after_save: Callable[[Callable[[], None]], BackgroundTask[None]],
        *,
        first: bool,
    ) -> None:
        self._store, self._run_after_save, self._first = store, run_after_save, first
        self._unproven: dict[str, tuple[int, int]] = {}
        """Attempt and step of each unproven checkpoint, by name."""
        self._healthy_attempt = -1
        self.healthy_step = -1
        """The step of the newest checkpoint that proved healthy."""
        self._last: BackgroundTask[None] | None = None
        self.errors: list[str] = []
        """Marks that could not be written, and why."""

    @property
    def busy(self) -> bool:
        """Whether a mark is being written."""
        return self._last is not None and not self._last.done

    def add(self, name: str, attempt: int, step: int) -> None:
        """Follow a new checkpoint."""
        self._unproven[name] = attempt, step

    def mark_healthy(self, attempt: int) -> None:
        """States up to this attempt proved good by what followed."""
        if attempt > self._healthy_attempt:
            self._healthy_attempt = attempt
            self.flush()

    def mark_suspect(self, attempt: int, reason: str) -> None:
        """Mark unproven checkpoints captured after this attempt suspect."""
        for name, (captured, _) in list(self._unproven.items()):
            if captured > attempt:
                self._write(name, "suspect", reason)

    def flush(self) -> None:
        """Write the marks of all checkpoints that are proven by now."""
        for name, (captured, step) in list(self._unproven.items()):
            if captured <= self._healthy_attempt:
                self.healthy_step = max(self.healthy_step, step)
                self._write(name, "healthy", f"no problem was found up to attempt {self._healthy_attempt}")

    def _write(self, name: str, health: Literal["healthy", "suspect"], reason: str) -> None:
        del self._unproven[name]
        if not self._first:
            return

        def write() -> None:
            try:
                self._store.mark(name, health, reason)
            except LookupError:
                pass  # pruned in the meantime
            except SaveFailed as failure:
                self.errors.append(f"{name} could not be marked {health}: {failure}")

        self._last = self._run_after_save(write)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """The result of resuming from a checkpoint."""

    step: int
    attempt: int
    checkpoint: str
    guard: Any
    """The guard's own state that was saved with the run."""
    equal: bool | None
    """Whether the loaded state has the saved hash, bit for bit; None if another number of ranks saved it."""
    replay: ReplayResult | None = None
    """Whether a saved batch has the loss it had."""
    notes: tuple[str, ...] = ()


class CheckpointManager:
    """Saves a live run in the background, one checkpoint at a time, and resumes from the newest usable one."""

    def __init__(
        self,
        root: Path,
        train_state: TrainState,
        *,
        on_event: EventCallback,
        group: RankGroup | None = None,
        interval: SaveInterval | None = None,
        keep: Retention | None = None,
        about: Mapping[str, Any] | None = None,
        replay_check: ReplayCheck | None = None,
    ) -> None:
        self.group = group or RankGroup()
        self.interval = interval or SaveInterval()
        self.store = CheckpointStore(root, keep=keep, stall_timeout=STALL_TIMEOUT)
        self.metrics: dict[str, float | torch.Tensor] = {}
        """The latest value of each metric, written to the manifest of the next checkpoint."""
        self._saver = AsyncSaver(train_state, self.store, self.group, replay_check=replay_check)
        self._train_state = train_state
        self._on_event = on_event
        self._about = {"versions": {"torch": torch.__version__, "python": platform.python_version()}, **(about or {})}
        self._began = time.monotonic()
        self._captured: PendingSave | None = None
        """Copied, and waiting for the metrics of its last update."""
        self._health = HealthMarks(self.store, self._saver.run_after_save, first=self.group.rank == 0)
        self._saved_step = -1
        self._captured_suspect = False
        self._stall_reported = False

    # -- every step

    @property
    def saved_step(self) -> int:
        """The step of the last save that was started; -1 before the first."""
        return self._saved_step

    @property
    def healthy_step(self) -> int:
        """The step of the newest checkpoint that proved healthy, as rank 0 knows it; -1 for none."""
        return self._health.healthy_step

    @property
    def idle(self) -> bool:
        """Whether no captured state is waiting and no save is running."""
        return self._captured is None and not self._saver.busy

    def before_update(self) -> None:
        """To be called before each optimizer step: a copy may still be in transfer to the host."""
        self._saver.before_update()

    def preallocate(self) -> None:
        """Allocate memory for copies; to be called when the optimizers have all the state they will ever have."""
        self._saver.preallocate()

    def due(self, step: int, *, free: bool = True) -> bool:
        """Whether a checkpoint is due; `step` counts the updates known to be applied.

        One that falls due during a save is due as soon as that has ended. All ranks must come to the same answer:
        `free` says, on all of them, that no rank is saving.
        """
        self.poll()
        if not self.interval.due(step):
            return False
        if self.group.world_size == 1:
            return self.idle
        if free:
            self.interval.reset(step)
        return free

    def request_save(self) -> None:
        """Make a save due at the next opportunity, because the last one could not be used."""
        self.interval.request()

    def capture(self, attempt: int, earlier: EarlierState | None = None) -> None:
        """Copy the run between two updates; it is written once the metrics of the last update are known."""
        if not self.idle:
            self._saver.decline(_BUSY)
            self._on_event("failed", f"not saved: {_BUSY}; retrying at the next interval", {})
            return
        self._captured = self._saver.capture(attempt, earlier=earlier)

    def withdraw_capture(self, attempt: int) -> None:
        """Discard a copy of this attempt that turned out to be from the middle of an iteration, and retry."""
        if self._captured is not None and self._captured.attempt == attempt:
            self._discard_capture()
            self.request_save()

    def metrics_read(self, step: int, attempt: int, guard: Callable[[], Any]) -> None:
        """Metrics up to `attempt` are known, and with them the number of applied updates: write a waiting copy."""
        captured = self._captured
        if captured is None or attempt < captured.attempt:
            return
        self._captured = None
        if self._captured_suspect or attempt > captured.attempt:
            self._saver.discard(captured)
            self._captured_suspect = False
            return
        self._begin(captured, step, guard())

    def save(
        self, step: int, attempt: int, guard: Any, *, kind: str = "regular", earlier: EarlierState | None = None
    ) -> SaveResult | None:
        """Save now and wait for it, after any running save; returns the result on rank 0."""
        self._discard_capture()
        self.poll(wait=True)
        if not self.idle:
            self._saver.decline(_BUSY)
            return None
        captured = self._saver.capture(attempt, kind=kind, earlier=earlier)
        self._begin(captured, step, guard)
        return self.poll(wait=True)

    def save_copy(self, copy: StateCopy, step: int, attempt: int, guard: Any) -> None:
        """Write a state held in memory as an emergency checkpoint, without waiting for it."""
        self._saver.write(self._saver.borrow(copy, attempt), step, self._manifest_info(), guard)

    def _begin(self, captured: PendingSave, step: int, guard: Any) -> None:
        self._saver.write(captured, step, self._manifest_info(), guard)
        if self.group.world_size == 1:
            self.interval.reset(step)
        self._saved_step = step

    def poll(self, *, wait: bool = False, until: float = math.inf) -> SaveResult | None:
        """Report the result of the save, if it has ended."""
        while self._health.errors:
            self._on_event("trouble", self._health.errors.pop(), {})
        result = self._saver.result(wait=wait, stall_timeout=STALL_TIMEOUT, until=until)
        if result is None:
            self._report_stall()
            return None
        self._stall_reported = False
        values = {"step": result.step, "kind": result.kind, "seconds": round(result.seconds, 3)}
        if result.error:
            self._saved_step = -1
            self._on_event("failed", f"not saved: {result.error}; retrying at the next interval", values)
        elif result.checkpoint is not None:
            name = result.checkpoint.name
            self._health.add(name, result.attempt, result.step)
            values |= {"name": name, "bytes": result.checkpoint.size, "removed": list(result.removed)}
            if result.replay_seconds is not None:
                values["probe_seconds"] = round(result.replay_seconds, 4)
            self._on_event("saved", f"saved as {name}", values)
        if result.left_out:
            self._on_event("left_out", f"cannot be saved: {', '.join(result.left_out[:5])}", {})
        if result.prune_error:
            self._on_event("trouble", result.prune_error, {})
        self._health.flush()
        return result

    def _report_stall(self) -> None:
        stalled = self._saver.write_watch.stalled_seconds
        if stalled > STALL_TIMEOUT and not self._stall_reported:
            self._stall_reported = True
            self._on_event("failed", f"not saved: checkpoint write has stalled for {stalled:.0f} s", {})

    # -- health

    def mark_healthy(self, attempt: int) -> None:
        """States up to this attempt proved good by what followed."""
        self._health.mark_healthy(attempt)

    def mark_suspect(self, attempt: int, reason: str) -> None:
        """States captured after this attempt may contain the fault."""
        if self._captured is not None and self._captured.attempt > attempt:
            self._captured_suspect = True
        self._health.mark_suspect(attempt, reason)

    # -- resuming

    def newest(self) -> StoredCheckpoint | None:
        """The verified checkpoint to resume from; None if there is none. Raises NoUsableCheckpoint."""
        return self.store.newest()

    def clean(self) -> None:
        """Remove what a killed process left; only for the process that holds the run's lock."""
        self.store.clean(alone=True)
        remove_messages(self.store.root)

    def resume(self, checkpoint: StoredCheckpoint) -> Resumed:
        """Load a checkpoint, and check the result: the live state must have the saved hash."""
        group, names = self.group, self._saver.names()
        loaded = load_checkpoint(
            checkpoint.folder, self._train_state, names, rank=group.rank, world_size=group.world_size
        )
        equal = hash_state(self._train_state.collect(), names) == loaded.hash if loaded.hash else None
        check = self._saver.replay_check
        replay = None if check is None else check.compare(loaded.replay_batch, same_world=equal is not None)
        self.interval.reset(checkpoint.step)
        self._saved_step = self._health.healthy_step = checkpoint.step
        return Resumed(
            step=checkpoint.step,
            attempt=checkpoint.attempt,
            checkpoint=checkpoint.name,
            guard=loaded.guard,
            equal=equal,
            replay=replay,
            notes=(*checkpoint.skipped, *loaded.notes),
        )

    def close(self, *, wait: float = math.inf) -> None:
        """Wait for the running save and for health marks, for at most `wait` seconds."""
        self._discard_capture()
        until = time.monotonic() + min(wait, STALL_TIMEOUT)
        self.poll(wait=True, until=math.inf if wait == math.inf else until)
        while self._health.busy and time.monotonic() < until:
            time.sleep(_POLL)
        self.poll()
        leave(self.store.root, self.group)

    def _discard_capture(self) -> None:
        if self._captured is not None:
            self._saver.discard(self._captured)
            self._captured = None

    def _manifest_info(self) -> dict[str, Any]:
        trained = time.monotonic() - self._began
        return {**self._about, "metrics": dict(self.metrics), "seconds": round(trained, 3)}
