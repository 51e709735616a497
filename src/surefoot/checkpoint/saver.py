"""Asynchronous saves: training waits only for a copy of its state; everything else runs in a background thread."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surefoot.background import BackgroundTask, BackgroundWorker
from surefoot.checkpoint.copies import LiveState, StateCopy
from surefoot.checkpoint.format.hashing import StateHasher, write_pieces
from surefoot.checkpoint.format.json_state import JsonEncoder
from surefoot.checkpoint.format.param_names import StateNames, name_tensors, with_replicated
from surefoot.checkpoint.format.pieces import (
    RankPieces,
    add_replay_batch,
    nonfinite_params,
    require_complete,
    require_finite,
    split_state,
)
from surefoot.checkpoint.format.rank_files import check_complete
from surefoot.checkpoint.format.shards import HostStaging, preallocate_staging
from surefoot.checkpoint.rank_rendezvous import RankGroup, SaveRendezvous
from surefoot.checkpoint.replay_check import ReplayBatch, ReplayCheck
from surefoot.checkpoint.rng import EarlierState
from surefoot.checkpoint.snapshot_memory import Location, free_bytes
from surefoot.checkpoint.store import CheckpointStore, CommitResult, FileEntry, SaveFailed, StoredCheckpoint
from surefoot.checkpoint.store.files import WriteWatch, watched_opener
from surefoot.checkpoint.train_state import TrainState

MAX_DEVICE_FRACTION = 0.5
"""Fraction of the free memory of a device that a copy may take there."""
_POLL = 0.002
_side_streams: dict[torch.device, torch.cuda.Stream] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingSave:
    """The state after one attempt, captured and still to be written."""

    attempt: int
    kind: str
    copy: StateCopy
    names: StateNames
    """Collected at capture time: while sharded weights are gathered, they are other tensors."""
    save_number: int = 0
    """The number of this save, counted alike by all ranks."""
    ready: tuple[Any, ...] = ()
    """CUDA events after which the copy is complete."""
    replay_batch: ReplayBatch | None = None
    """A batch with the loss it has in this state."""
    borrowed: bool = False
    """The copy belongs to the snapshot ring; its memory is not for the next save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """The result of one save."""

    step: int
    attempt: int
    kind: str
    checkpoint: StoredCheckpoint | None = None
    """The new checkpoint; only rank 0 has it."""
    error: str = ""
    seconds: float = 0.0
    left_out: tuple[str, ...] = ()
    """Parts of the state that cannot be saved."""
    removed: tuple[str, ...] = ()
    prune_error: str = ""
    """Why older checkpoints could not be removed."""
    replay_seconds: float | None = None
    """Seconds that training waited for the loss of the replay batch; None if there is none."""


@dataclass(slots=True)
class AsyncSaver:
    """Writes at most one save at a time."""

    train_state: TrainState
    store: CheckpointStore
    group: RankGroup = field(default_factory=RankGroup)
    write_watch: WriteWatch = field(default_factory=WriteWatch)
    """Times the writing of tensors; the store itself watches its other calls."""
    replay_check: ReplayCheck | None = None
    _worker: BackgroundWorker = field(default_factory=lambda: BackgroundWorker("surefoot-save"))
    location: Location | None = None
    """Where copies are made; None to choose by free memory."""
    _num_saves: int = 0
    _save_task: BackgroundTask[SaveResult] | None = None
    _allocating: BackgroundTask[StateCopy] | None = None
    _spare_copy: StateCopy | None = None
    _names: StateNames | None = None
    _in_transfer: StateCopy | None = None

    @property
    def busy(self) -> bool:
        """Whether a save is running, or memory for one is still being allocated."""
        if self._allocating is not None and self._allocating.done:
            self._spare_copy, self._allocating = self._allocating.result(), None
        return self._save_task is not None or self._allocating is not None

    # -- in the training thread

    def preallocate(self) -> None:
        """Allocate the memory for a first save: pinning host memory takes seconds, and device memory blocks."""
        live = self.train_state.collect()
        if self._spare_copy is not None or self._allocating is not None or not live.devices:
            return
        if self._choose_location(live) == "host":
            self._allocating = self._worker.submit(lambda: StateCopy("host").allocate_for(live))
        else:
            copy = self._spare_copy = self.train_state.copy(live, location="device")
            names, group = self._names_for(live), self.group
            ranks = {"rank": group.rank, "world_size": group.world_size}
            self._worker.submit(lambda: _warm_up(split_state(copy, names, **ranks)))

    def capture(self, attempt: int, *, kind: str = "regular", earlier: EarlierState | None = None) -> PendingSave:
        """Copy the run as it is now, the only thing that training waits for.

        `earlier` has parts of the state as they were before the loop went on to its next batch.
        """
        live = self.train_state.collect()
        if earlier is not None:
            earlier.apply_to(live)
        into, self._spare_copy = self._spare_copy, None
        copy = self.train_state.copy(live, into, location=self._choose_location(live, into))
        self._in_transfer = copy
        replay_batch = None
        if self.replay_check is not None and not self.replay_check.disabled_reason:
            buffers = None if earlier is None else {id(buffer): before for buffer, before in earlier.buffers}
            replay_batch = self.replay_check.take(buffers)
        ready = tuple(torch.cuda.current_stream(d).record_event() for d in live.devices)
        self._num_saves += 1
        return PendingSave(
            attempt=attempt,
            kind=kind,
            copy=copy,
            names=self._names_for(live),
            save_number=self._num_saves,
            ready=(*ready, *(event for _, event in copy.transfers)),
            replay_batch=replay_batch,
        )

    def borrow(self, copy: StateCopy, attempt: int) -> PendingSave:
        """An emergency save of a copy that its owner leaves unchanged until it is written."""
        self._num_saves += 1
        devices = {t.device for t in copy.tensors if t.is_cuda}
        return PendingSave(
            attempt=attempt,
            kind="emergency",
            copy=copy,
            names=self._names_for(self.train_state.collect()),
            save_number=self._num_saves,
            ready=tuple(torch.cuda.current_stream(d).record_event() for d in devices),
            borrowed=True,
        )

    def _names_for(self, live: LiveState) -> StateNames:
        """The names of the live state; computed again only when something has no name yet."""
        places = ((place.root, place.module, place.name) for place in live.rest.places)
        params = (id(p) for o in self.train_state.optimizers for group in o.param_groups for p in group["params"])
        names = self._names
        if names is None or any(p not in names.places for p in places) or any(i not in names.by_id for i in params):
            names = self._names = self.names()
        return names

    def before_update(self) -> None:
        """To be called before each optimizer step: a copy may still be in transfer to the host."""
        if self._in_transfer is not None:
            self._in_transfer.wait_on_device()
            self._in_transfer = None

    def write(self, pending: PendingSave, step: int, about: Mapping[str, Any], guard: Any = None) -> None:
        """Start writing a copy as the state after `step` updates; `guard` is further state to save as JSON."""
        if self._save_task is not None:
            raise RuntimeError("a save is still running")
        self._save_task = self._worker.submit(lambda: self._save(pending, step, about, guard))

    def run_after_save(self, work: Callable[[], None]) -> BackgroundTask[None]:
        """Run a small piece of disk work in the background, after the running save."""
        return self._worker.submit(work)

    def discard(self, pending: PendingSave) -> None:
        """Do not write this copy; its memory is reused for the next one."""
        self._spare_copy = pending.copy

    def decline(self, reason: str) -> None:
        """Tell the other ranks, from another thread, that this rank takes no part in the current save."""
        if self.group.world_size == 1:
            return
        self._num_saves += 1
        rendezvous = SaveRendezvous(self.store.root, self.group, self._num_saves)
        report = rendezvous.report_failure
        threading.Thread(target=report, args=(reason,), name="surefoot-absent", daemon=True).start()

    def result(
        self, *, wait: bool = False, stall_timeout: float = math.inf, until: float = math.inf
    ) -> SaveResult | None:
        """The result of the save, returned once, when it has ended.

        With `wait`, wait for it until this time, unless the disk stalls for longer than `stall_timeout`.
        """
        task = self._save_task
        while wait and task is not None and not task.done:
            if self.write_watch.stalled_seconds > stall_timeout or time.monotonic() > until:
                return None
            time.sleep(_POLL)
        if task is None or not task.done:
            return None
        self._save_task = None
        return task.result()

    def _choose_location(self, live: LiveState, into: StateCopy | None = None) -> Location:
        """On the device if there is room or a copy already, otherwise in host memory."""
        if self.location is not None:
            return self.location
        if into is not None and into.layouts == live.layouts:
            return into.location
        sizes = {device: size for device, size in live.nbytes.items() if device.type == "cuda"}
        fits = all(size <= MAX_DEVICE_FRACTION * free_bytes(device) for device, size in sizes.items())
        return "device" if fits else "host"

    def names(self) -> StateNames:
        """Names for the run as it is now."""
        state = self.train_state
        return name_tensors(zip(state.root_names, state.roots, strict=True), state.optimizers)

    # -- in the background thread

    def _save(self, pending: PendingSave, step: int, about: Mapping[str, Any], guard: Any) -> SaveResult:
        began = time.monotonic()
        replay_seconds = None if pending.replay_batch is None else pending.replay_batch.seconds
        values: dict[str, Any] = {"step": step, "attempt": pending.attempt, "kind": pending.kind}
        values["replay_seconds"] = replay_seconds
        try:
            for event in pending.ready:
                event.synchronize()
            with on_side_streams(t.device for t in pending.copy.tensors):
                metrics = {name: float(value) for name, value in about.get("metrics", {}).items()}
                more = {"metrics": metrics, "kind": pending.kind, "world_size": self.group.world_size}
                values |= self._save_together(pending, step, guard, {**about, **more})
        except SaveFailed as failure:
            return SaveResult(**values, error=failure.reason, seconds=time.monotonic() - began)
        except Exception as error:  # whatever it is, it is reported and training continues
            return SaveResult(**values, error=f"{type(error).__name__}: {error}", seconds=time.monotonic() - began)
        finally:
            self._spare_copy = self._spare_copy if pending.borrowed else pending.copy
        return SaveResult(**values, seconds=time.monotonic() - began)

    def _plan(
        self, pending: PendingSave, guard: Any, rendezvous: SaveRendezvous | None
    ) -> tuple[RankPieces, StateHasher]:
        ranks = {"rank": self.group.rank, "world_size": self.group.world_size}
        pieces = split_state(pending.copy, pending.names, **ranks)
        hasher = StateHasher(pending.copy, pieces, pending.names)
        extra = hasher.extra_hashes() if rendezvous is not None else {}
        replicated = rendezvous.agree_on_replicated(extra) if rendezvous is not None and extra else frozenset()
        if replicated:
            pieces = split_state(pending.copy, with_replicated(pending.names, replicated), **ranks)
        encoder = JsonEncoder(lambda path, value: None, Tensor)
        pieces.state["guard"] = encoder.encode(guard, "guard")
        pieces.left_out += encoder.left_out
        if pending.replay_batch is not None:
            add_replay_batch(pieces, pending.replay_batch.as_dict(), self.group.rank)
        if pending.kind != "emergency" or pending.borrowed:
            require_finite(pieces)
        return pieces, hasher

    def _save_together(self, pending: PendingSave, step: int, guard: Any, about: Mapping[str, Any]) -> dict[str, Any]:
        rendezvous = None
        if self.group.world_size > 1:
            rendezvous = SaveRendezvous(self.store.root, self.group, pending.save_number)
        if rendezvous is not None and self.group.rank > 0:
            try:
                pieces, hasher = self._plan(pending, guard, rendezvous)
                entries = self._write_files(rendezvous.await_folder(), pieces, hasher)
            except Exception as error:
                rendezvous.report_failure(str(error))
                raise
            rendezvous.report_written(entries)
            return {"left_out": tuple(pieces.left_out)}
        error = "rank 0 failed"
        try:
            pieces, hasher = self._plan(pending, guard, rendezvous)
            commit = self._commit(rendezvous, pieces, hasher, about, step=step, attempt=pending.attempt)
            error = ""
        except SaveFailed as failure:
            error = failure.reason
            raise
        finally:
            if rendezvous is not None:
                rendezvous.publish_result(error)
        return {
            "checkpoint": commit.checkpoint,
            "removed": commit.removed,
            "prune_error": commit.prune_error,
            "left_out": tuple(pieces.left_out),
        }

    def _commit(
        self,
        rendezvous: SaveRendezvous | None,
        pieces: RankPieces,
        hasher: StateHasher,
        about: Mapping[str, Any],
        *,
        step: int,
        attempt: int,
    ) -> CommitResult:
        needs = sum(s.tensor.numel() * s.tensor.element_size() for s in pieces.shards.values())
        try:
            draft = self.store.draft(step, attempt, needs=needs)
        except SaveFailed as failure:
            if rendezvous is not None:
                rendezvous.report_failure(failure.reason)
            raise
        with self.store.filling(draft):
            if rendezvous is not None:
                rendezvous.announce_folder(draft.folder)
            entries = self._write_files(draft.folder, pieces, hasher)
            if rendezvous is not None:
                entries |= rendezvous.collect_written()
                check_complete(draft.folder)
            else:
                require_complete(pieces)
            return self.store.commit(draft, entries, about)

    def _write_files(self, folder: Path, pieces: RankPieces, hasher: StateHasher) -> dict[str, FileEntry]:
        opener = watched_opener(self.store.files, self.write_watch)
        written = write_pieces(folder, pieces, rank=self.group.rank, opener=opener, hasher=hasher)
        return {file.name: FileEntry(file.size, file.digest) for file in written}


@contextlib.contextmanager
def on_side_streams(devices: Iterable[torch.device]) -> Iterator[None]:
    """Launch work of this thread on separate streams of these devices, so that it does not delay training.

    A new thread starts on the stream that training uses. Wait for the events of everything that is read here first.
    """
    with contextlib.ExitStack() as stack:
        for device in {d for d in devices if d.type == "cuda"}:
            if device not in _side_streams:
                _side_streams[device] = torch.cuda.Stream(device)
            stack.enter_context(torch.cuda.stream(_side_streams[device]))
        yield


def _warm_up(pieces: RankPieces) -> None:
    """Run the device part of a save once: the first use of a kernel loads it and allocates memory, and blocks all
    launches meanwhile. Which kernels, and how much memory, depends on the state to save."""
    preallocate_staging()
    with on_side_streams(shard.tensor.device for shard in pieces.shards.values()):
        nonfinite_params(pieces)
        for _ in HostStaging().contents([shard.tensor for shard in pieces.shards.values() if shard.tensor.is_cuda]):
            pass
