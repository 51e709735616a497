"""The last few snapshots of a run in memory, and which of them are known to be good."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from surefoot.background import BackgroundTask, BackgroundWorker
from surefoot.checkpoint.copies import LiveState, StateCopy, local_part
from surefoot.checkpoint.frozen_params import BaseCheck, BaseCopy, SharedBase, describe_changed
from surefoot.checkpoint.snapshot_ages import next_to_drop
from surefoot.checkpoint.snapshot_memory import MIN_SNAPSHOTS, Location, format_bytes, free_bytes, plan_snapshots
from surefoot.checkpoint.train_state import NonTensorState, TrainState
from surefoot.checkpoint.tree import TensorSlot, detach_tensors


@dataclass(slots=True, eq=False)
class Snapshot:
    """The state of a run after one attempted update."""

    attempt: int
    step: int
    copy: StateCopy
    good: bool = False
    """The steps after it were healthy."""
    in_use: bool = False
    """It is being read: its memory must not be reused."""
    allocated: bool = False
    """Memory had to be allocated for it while training waited."""
    base_check: BaseCheck | None = None
    """Whether the frozen parameters were those of the shared base; None once that is known."""


class SnapshotRing:
    """Takes snapshots, drops old ones, and rewinds to a good one.

    All ranks call it alike and at the same attempts. Memory may run out on one rank only, so the ranks must agree on
    the snapshot to rewind to; `snapshots` lists what this rank has.
    """

    def __init__(
        self, train_state: TrainState, *, size: int = 3, budget_bytes: int | None = None, max_age: int = 0
    ) -> None:
        if size < MIN_SNAPSHOTS:
            raise ValueError(
                f"a snapshot ring needs size >= {MIN_SNAPSHOTS}, for a good snapshot and the next; got size={size}"
            )
        self.disabled_reason: str | None = None
        """Why no snapshots are taken; None while they are."""
        self._train_state = train_state
        self.size = size
        """Snapshots kept at most, as far as memory allows."""
        self._budget = budget_bytes
        self._max_age = max_age
        """An old snapshot stays until the next one is this many attempts old, or until it is twice as old itself; ones
        between are dropped instead."""
        self.snapshots: list[Snapshot] = []
        """All snapshots, oldest first."""
        self._spare_copies: list[StateCopy] = []
        """Memory of dropped snapshots, for the next ones."""
        self._base = SharedBase()
        self._layout: object = None
        self.messages: list[str] = []
        """Messages about frozen parameters that changed."""
        self.location: Location = "device"
        """Where the next snapshots are."""
        self._in_transfer: StateCopy | None = None
        self.watches_updates = False
        """Whether `before_update` has something to do: a copy may be in transfer, or frozen parameters are shared."""
        self._worker = BackgroundWorker("surefoot-ring")
        self._allocating: BackgroundTask[StateCopy] | None = None
        """Memory for a later snapshot, where allocation is slow."""

    @property
    def in_transfer(self) -> bool:
        """The next optimizer step may have to wait for a snapshot's way to the host."""
        return self._in_transfer is not None and bool(self._in_transfer.transfers)

    @property
    def nbytes(self) -> int:
        copies = [*(s.copy for s in self.snapshots), *self._spare_copies]
        return sum(copy.nbytes for copy in copies) + self.base_nbytes

    @property
    def base_nbytes(self) -> int:
        """Bytes of the frozen parameters that snapshots share; part of `nbytes`."""
        return self._base.nbytes(s.copy for s in self.snapshots)

    # -- taking snapshots

    def take(self, attempt: int, step: int, *, wait: bool = True) -> Snapshot | None:
        """Copy the current state as an unproven snapshot; None if no memory may be freed for it.

        With `wait=False`, also None while its memory is still being allocated: host memory is pinned at a few GB/s.
        """
        if self.disabled_reason is not None:
            return None
        self.verify(wait=False)
        live = self._collect()
        self._yield_memory(live)
        while self.disabled_reason is None and self._make_room(attempt):
            snapshot, shortage = self._try_take(live, attempt, step, wait=wait)
            if snapshot is not None:
                self._in_transfer, self.watches_updates = snapshot.copy, True
                self.snapshots.append(snapshot)
                if not wait and len(self.snapshots) < self.size:
                    self._preallocate(live)
                return snapshot
            if not shortage:
                return None
            self.size = len(self.snapshots) + 1
            self.shrink(shortage)
        return None

    def preallocate(self) -> None:
        """Allocate memory for the next snapshot in the background, where that is slow."""
        if self.disabled_reason is None:
            self._preallocate(self._collect())

    def _collect(self) -> LiveState:
        live = self._train_state.collect()
        self._base.observe(live)
        self._base.assign(live, self.location)
        if live.memory_layout != self._layout:
            self._plan(live)
        return live

    def _preallocate(self, live: LiveState) -> None:
        slow = self.disabled_reason is None and self.location == "host"
        base = self._base.pending
        missing = base is not None and not base.has_memory
        if slow and self._allocating is None and (missing or not any(copy.fits(live) for copy in self._spare_copies)):
            into = self._spare_copies.pop() if self._spare_copies else StateCopy(self.location)
            self._allocating = self._worker.submit(functools.partial(_allocate, into, live, base))

    def before_update(self) -> None:
        """To be called before each optimizer step while `watches_updates`."""
        if self._in_transfer is not None:
            self._in_transfer.wait_on_device()
            self._in_transfer = None
        if self.disabled_reason is None:
            self._base.before_update()
        self.watches_updates = self._base.in_use

    def shrink(self, reason: str) -> None:
        """Keep one snapshot fewer and free its memory; below two, take none at all."""
        self.size -= 1
        if self.size < MIN_SNAPSHOTS:
            self._disable(reason)
        self._make_room()
        self._drop_spare_memory()

    def limit(self, size: float) -> None:
        """Keep at most so many snapshots, as another rank has no room for more; NaN changes nothing."""
        if self.disabled_reason is None and MIN_SNAPSHOTS <= size < self.size:
            self.size = int(size)
            self._make_room()
            self._drop_spare_memory()

    def _plan(self, live: LiveState) -> None:
        """The state has a new layout, as after the optimizer's first step: choose location and number again."""
        plan = plan_snapshots(live.nbytes, self._budget, self.size, self._base.bytes_for(live))
        self.location, self.size = plan.location or "device", plan.count
        self._drop_spare_memory()
        self._base.assign(live, self.location)
        self._layout = live.memory_layout
        if plan.location is None:
            self._disable(plan.reason)

    def _drop_spare_memory(self) -> None:
        """Free memory that no snapshot uses, and abandon allocation in progress."""
        self._spare_copies.clear()
        self._allocating = None
        self._base.forget_pending()

    def _yield_memory(self, live: LiveState) -> None:
        """If training needs the memory that was free, as with longer batches, keep only the newest good snapshot on
        the device, until there is a younger one elsewhere."""
        nbytes = self.nbytes
        devices = {part.device for part in live.local_tensors if not part.is_meta}
        if self.location == "host" or all(free_bytes(device) >= nbytes / 2 for device in devices):
            return
        best = self.newest_good()
        self.snapshots = [snapshot for snapshot in self.snapshots if snapshot is best or snapshot.in_use]
        self._plan(live)

    def _disable(self, reason: str) -> None:
        self.disabled_reason = reason
        self.snapshots.clear()
        self._drop_spare_memory()
        self._base.clear()
        self._in_transfer = None

    def _make_room(self, coming: int | None = None) -> bool:
        """Drop snapshots until there is room for those that are there, and for a coming one at this attempt."""
        while len(self.snapshots) + (coming is not None) > self.size:
            now = self.snapshots[-1].attempt + 1 if coming is None else coming
            dropped = next_to_drop(self.snapshots, now, self._max_age)
            if dropped is None:
                return False
            self._forget(self.snapshots[dropped])
        return True

    def _forget(self, snapshot: Snapshot) -> None:
        self.snapshots.remove(snapshot)
        if snapshot.copy.location == self.location:
            snapshot.copy.release_shared()
            self._spare_copies.append(snapshot.copy)

    def _try_take(self, live: LiveState, attempt: int, step: int, *, wait: bool) -> tuple[Snapshot | None, str]:
        """A snapshot, or why there is no memory for one; an empty reason if memory is still being allocated."""
        self._base.assign(live, self.location)
        try:
            if self._allocating is not None and (wait or self._allocating.done):
                task, self._allocating = self._allocating, None
                self._spare_copies.append(task.result())
            into = next((copy for copy in self._spare_copies if copy.fits(live)), None)
            base = self._base.pending
            missing = into is None or (base is not None and not base.has_memory)
            if missing and not wait and self.location == "host":
                self._preallocate(live)
                return None, ""
            allocated = into is None
            into = into or (self._spare_copies[-1] if self._spare_copies else None)
            if into is not None:
                self._spare_copies.remove(into)
            check = self._check_base(live)
            copy = self._train_state.copy(live, into, location=self.location)
            return Snapshot(attempt, step, copy, allocated=allocated, base_check=check), ""
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            message = str(error).partition("\n")[0] or type(error).__name__
            return None, f"out of memory while taking a snapshot: {message}"

    def _check_base(self, live: LiveState) -> BaseCheck | None:
        try:
            return self._base.check(live)
        except Exception as error:
            if _is_out_of_memory(error):
                raise
            self._base.disable()
            self._base.assign(live, self.location)
            self.messages.append(f"frozen parameters cannot be checked ({error}); snapshots copy them in full")
            return None

    # -- which snapshots are good

    def mark_good(self, attempt: int) -> None:
        """Mark all snapshots taken at or before this attempt good."""
        for snapshot in self.snapshots:
            snapshot.good |= snapshot.attempt <= attempt

    def drop_unproven_after(self, attempt: int) -> None:
        """Drop unproven snapshots taken after this attempt: they may contain the fault."""
        for snapshot in tuple(self.snapshots):
            if not snapshot.good and snapshot.attempt > attempt:
                self._forget(snapshot)

    def verify(self, *, wait: bool = True) -> None:
        """Drop snapshots whose frozen parameters differed from their base; needed before choosing one to rewind to.

        Without `wait`, only those for which that is known by now.
        """
        early = self._base.take_early_changes()
        if early:
            self.messages.append(describe_changed(early))
        for snapshot in tuple(self.snapshots):
            changed = None if snapshot.base_check is None else snapshot.base_check.changed(wait=wait)
            if changed is None:
                continue
            snapshot.base_check = None
            if changed:
                self._forget(snapshot)
                names = self._base.mark_changed(changed)
                if names:
                    self.messages.append(describe_changed(names, snapshot.attempt))

    def newest_good(self, before: int | None = None) -> Snapshot | None:
        """The newest good snapshot, or the newest good one taken before an attempt."""
        candidates = (s for s in reversed(self.snapshots) if s.good and (before is None or s.attempt < before))
        return next(candidates, None)

    # -- rewinding

    def rewind(self, snapshot: Snapshot) -> None:
        """Restore a snapshot, and drop those taken after it."""
        self.verify()
        if snapshot not in self.snapshots:
            raise ValueError(f"the snapshot of attempt {snapshot.attempt} is not in the ring: {self.describe()}")
        self._train_state.restore(snapshot.copy)
        for later in self.snapshots[self.snapshots.index(snapshot) + 1 :]:
            self._forget(later)

    def describe(self) -> str:
        """A one-line summary of the snapshots."""
        if self.disabled_reason is not None:
            return f"no snapshots are taken: {self.disabled_reason}"
        if not self.snapshots:
            return "no snapshots yet"
        listed = ", ".join(f"attempt {s.attempt} ({'good' if s.good else 'unproven'})" for s in self.snapshots)
        location = "in host memory" if self.snapshots[-1].copy.location == "host" else "on the model's device"
        base = f" (including {format_bytes(self.base_nbytes)} of shared frozen parameters)" if self.base_nbytes else ""
        return f"{len(self.snapshots)} of {self.size} snapshots, {format_bytes(self.nbytes)} {location}{base}: {listed}"


def _allocate(into: StateCopy, live: LiveState, base: BaseCopy | None) -> StateCopy:
    """Allocate memory for the base that is still to be copied, if any, and for the rest of the state."""
    if base is not None:
        base.allocate()
    return into.allocate_for(live)


def _is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, as opposed to other memory errors such as an illegal access."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "out of memory" in text or "allocate" in text


# -- a snapshot as a checkpoint


def checkpoint_copy(
    copy: StateCopy, train_state: TrainState, current: Mapping[str, Any], renamed: Mapping[str, str]
) -> StateCopy:
    """A snapshot as it is written to disk; it refers to the memory of `copy`, which must not change until then.

    A run that rewinds goes on with its next batch, not with one it has seen. So the data position, and options that no
    scheduler of ours sets, are the current ones: resuming from here is the same as rewinding. `current` has states by
    name; `renamed` maps names in the copy to names in a checkpoint.
    """
    result = StateCopy(copy.location)
    result.tensors, result.layouts, result.shardings = list(copy.tensors), list(copy.layouts), dict(copy.shardings)
    rest: NonTensorState = copy.rest

    def slot(tensor: Tensor) -> TensorSlot:
        part = local_part(tensor).clone()
        result.tensors.append(part)
        result.layouts.append((part.shape, part.stride(), part.dtype, part.device, False))
        return TensorSlot(len(result.tensors) - 1)

    groups = [
        saved
        if names is None
        else [_merged(detach_tensors(_options(g), slot), saved, n, names) for n, g in enumerate(o.param_groups)]
        for o, saved, names in zip(train_state.optimizers, rest.param_groups, rest.restored_options, strict=True)
    ]
    states = {renamed.get(name, name): state for name, state in rest.extra.items()}
    states |= {name: detach_tensors(state, slot) for name, state in current.items()}
    extra = {name: states[name] for name in train_state.extra if name in states}
    result.rest = replace(rest, param_groups=groups, extra=extra)
    return result


def _merged(
    current: dict[str, Any], saved: Sequence[dict[str, Any]], index: int, names: AbstractSet[str]
) -> dict[str, Any]:
    """The current options of a group, but the saved values of those that the optimizer's own step changes."""
    options = saved[index] if index < len(saved) else {}
    return current | {name: value for name, value in options.items() if name in names}


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
