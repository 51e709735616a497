"""The last few states of a run in memory, and which of them are proven to be good."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch

from surefoot.background import BackgroundTask, BackgroundWorker
from surefoot.checkpoint.copies import Copy, Look
from surefoot.checkpoint.frozen_params import BaseCheck, BaseCopy, SharedBase, describe_moved
from surefoot.checkpoint.snapshot_memory import FEWEST, Home, choose_home, free_bytes, in_words
from surefoot.checkpoint.train_state import TrainState


@dataclass(slots=True, eq=False)
class Snapshot:
    """A run as it was after one attempted update."""

    attempt: int
    step: int
    copy: Copy
    good: bool = False
    """The steps after it were healthy."""
    held: bool = False
    """Somebody reads it still: its memory is not for the next one."""
    check: BaseCheck | None = None
    """Whether the frozen parameters were those of the base it refers to; None once that is known."""


class SnapshotRing:
    """Takes states, forgets the old ones, and goes back to a good one.

    All processes of a run call it alike and at the same attempts. Memory may run out on one of them only, so they must
    agree on the state to go back to; `states` says what each of them has.
    """

    def __init__(self, whole: TrainState, *, size: int = 3, budget_bytes: int | None = None, reach: int = 0) -> None:
        if size < FEWEST:
            raise ValueError(f"a ring needs room for {FEWEST} states or more, a good one and the next; got size={size}")
        self.off: str | None = None
        """Why no states are kept, if none are."""
        self._whole = whole
        self._size = size
        self._budget = budget_bytes
        self._reach = reach
        """An old good state is kept as long as it is no older than so many attempts, and others between go instead."""
        self._states: list[Snapshot] = []
        self._spare: list[Copy] = []
        """Memory of states that were forgotten, for the next ones."""
        self._base = SharedBase()
        """Frozen parameters, to which states refer."""
        self._layout: object = None
        self.messages: list[str] = []
        """What is to be told of frozen parameters that were changed."""
        self.home: Home = "device"
        """Where the next states live."""
        self._arriving: Copy | None = None
        self._runner = BackgroundWorker("surefoot-ring")
        self._making: BackgroundTask[Copy] | None = None
        """Memory for a state to come, where that takes long to get."""

    @property
    def states(self) -> tuple[Snapshot, ...]:
        """What is held, oldest first."""
        return tuple(self._states)

    @property
    def nbytes(self) -> int:
        copies = [*(s.copy for s in self._states), *self._spare]
        return sum(copy.nbytes for copy in copies) + self.base_nbytes

    @property
    def base_nbytes(self) -> int:
        """Bytes of the frozen parameters that states share; part of `nbytes`."""
        return self._base.nbytes(s.copy for s in self._states)

    # -- taking

    def take(self, attempt: int, step: int, *, wait: bool = True) -> Snapshot | None:
        """Keep the run as it is now, unproven; None when there is no room that may be given up for it.

        With `wait` false also None while its memory is still being made: pages of the host that a GPU may write to
        come at a few GB a second.
        """
        if self.off is not None:
            return None
        self.verify(wait=False)
        look = self._look()
        self._give_way(look)
        while self.off is None and self._make_room():
            state, shortage = self._try(look, attempt, step, wait=wait)
            if state is not None:
                self._arriving = state.copy
                self._states.append(state)
                if not wait and len(self._states) < self._size:
                    self._make_ready(look)
                return self._states[-1]
            if not shortage:
                return None
            self._size = len(self._states) + 1
            self.shrink(shortage)
        return None

    def prepare(self) -> None:
        """Have the memory of the next state made behind the run's back, where that takes long."""
        if self.off is None:
            self._make_ready(self._look())

    def _look(self) -> Look:
        look = self._whole.look()
        self._base.observe(look)
        self._base.assign(look, self.home)
        if look.layout != self._layout:
            self._choose(look)
        return look

    def _make_ready(self, look: Look) -> None:
        slow = self.off is None and self.home == "host"
        base = self._base.pending
        lacking = base is not None and not base.has_memory
        if slow and self._making is None and (lacking or not any(copy.fits(look) for copy in self._spare)):
            into = self._spare.pop() if self._spare else Copy(self.home)
            self._making = self._runner.submit(functools.partial(_allocate, into, look, base))

    def settle(self) -> None:
        """To be called before an optimizer's step: the last state may still be on its way to the host."""
        if self._arriving is not None:
            self._arriving.settle()
            self._arriving = None
        if self.off is None:
            self._base.before_update()

    def shrink(self, reason: str) -> None:
        """Make do with one state less and free its memory; with none at all where two would be too many."""
        self._size -= 1
        if self._size < FEWEST:
            self._go_off(reason)
        self._make_room(for_next=False)
        self._drop_spare()

    def _choose(self, look: Look) -> None:
        """The run has grown, as with the optimizer's first step: choose anew where states live and how many."""
        choice = choose_home(look.nbytes, self._budget, self._size, self._base.bytes_for(look))
        self.home, self._size = choice.home or "device", choice.count
        self._drop_spare()
        self._base.assign(look, self.home)
        self._layout = look.layout
        if choice.home is None:
            self._go_off(choice.reason)

    def _drop_spare(self) -> None:
        """Give up memory that no state lies on, and what is still being made."""
        self._spare.clear()
        self._making = None
        self._base.forget_pending()

    def _give_way(self, look: Look) -> None:
        """A run that has grown into the room which was left, as with longer batches, comes first: of the states beside
        it only the best one stays, until there is a younger one in another place."""
        own = self.nbytes
        devices = {part.device for part in look.parts if not part.is_meta}
        if self.home == "host" or all(free_bytes(device) >= own / 2 for device in devices):
            return
        best = self.newest_good()
        self._states = [state for state in self._states if state is best or state.held]
        self._choose(look)

    def _go_off(self, reason: str) -> None:
        self.off = reason
        self._states.clear()
        self._drop_spare()
        self._base.clear()
        self._arriving = None

    def _make_room(self, *, for_next: bool = True) -> bool:
        """Forget old good states first, then the young unproven ones.

        The newest good state stays, and so does the oldest unproven one, which will be the next to be proven: were it
        given up for younger ones, none would ever live to be.
        """
        while len(self._states) + for_next > self._size:
            good = [s for s in self._states if s.good]
            unproven = [s for s in self._states if not s.good]
            victims = self._oldest_first(good) or unproven[:0:-1]
            if not victims:
                return False
            self._forget(victims[0])
        return True

    def _oldest_first(self, good: list[Snapshot]) -> list[Snapshot]:
        """Good states that may be given up, in this order; the newest may not."""
        free = [s for s in good[:-1] if not s.held]
        if len(free) < 2 or self._states[-1].attempt - free[0].attempt > self._reach:
            return free
        # The one that leaves the least behind: the next older state is not far from it.
        gaps = {id(b): b.attempt - a.attempt for a, b in itertools.pairwise(free)}
        return sorted(free[1:], key=lambda s: gaps[id(s)])

    def _forget(self, state: Snapshot) -> None:
        self._states.remove(state)
        if state.copy.home == self.home:
            state.copy.release_shared()
            self._spare.append(state.copy)

    def _try(self, look: Look, attempt: int, step: int, *, wait: bool) -> tuple[Snapshot | None, str]:
        """A state, or why there is no memory for one; no reason where it is only a matter of time."""
        self._base.assign(look, self.home)
        try:
            if self._making is not None and (wait or self._making.done):
                made, self._making = self._making, None
                self._spare.append(made.result())
            into = next((copy for copy in self._spare if copy.fits(look)), None)
            base = self._base.pending
            lacking = into is None or (base is not None and not base.has_memory)
            if lacking and not wait and self.home == "host":
                self._make_ready(look)
                return None, ""
            into = into or (self._spare[-1] if self._spare else None)
            if into is not None:
                self._spare.remove(into)
            check = self._check(look)
            return Snapshot(attempt, step, self._whole.keep(look, into, home=self.home), check=check), ""
        except (RuntimeError, MemoryError) as error:
            if not _is_shortage(error):
                raise
            said = str(error).partition("\n")[0] or type(error).__name__
            return None, f"memory ran out when a state was taken: {said}"

    def _check(self, look: Look) -> BaseCheck | None:
        try:
            return self._base.check(look)
        except Exception as error:
            if _is_shortage(error):
                raise
            self._base.give_up()
            self._base.assign(look, self.home)
            self.messages.append(f"frozen parameters cannot be checked ({error}); snapshots copy them in full")
            return None

    # -- judging

    def prove(self, attempt: int) -> None:
        """All states taken at or before this attempt are good from now on."""
        for state in self._states:
            state.good |= state.attempt <= attempt

    def doubt(self, attempt: int) -> None:
        """Forget unproven states taken after this attempt: they may hold the trouble."""
        for state in self.states:
            if not state.good and state.attempt > attempt:
                self._forget(state)

    def verify(self, *, wait: bool = True) -> None:
        """Forget states whose frozen parameters were not those of their base; due before one is chosen to go back to.

        Without `wait` only of those of which that is known by now.
        """
        early = self._base.moved_early()
        if early:
            self.messages.append(describe_moved(early))
        for state in self.states:
            changed = None if state.check is None else state.check.changed(wait=wait)
            if changed is None:
                continue
            state.check = None
            if changed:
                self._forget(state)
                names = self._base.moved(changed)
                if names:
                    self.messages.append(describe_moved(names, state.attempt))

    def newest_good(self, before: int | None = None) -> Snapshot | None:
        """The newest good state, or the newest taken before an attempt."""
        fitting = (s for s in reversed(self._states) if s.good and (before is None or s.attempt < before))
        return next(fitting, None)

    # -- going back

    def rewind(self, state: Snapshot) -> None:
        """Put a state back; those taken after it belong to a past that did not happen, and are forgotten."""
        self.verify()
        if state not in self._states:
            raise ValueError(f"the state of attempt {state.attempt} is not in the ring any more: {self.describe()}")
        self._whole.put_back(state.copy)
        for other in self._states[self._states.index(state) + 1 :]:
            self._forget(other)

    def describe(self) -> str:
        """What is held, in words."""
        if self.off is not None:
            return f"no states are kept: {self.off}"
        if not self._states:
            return "no states yet"
        told = ", ".join(f"attempt {s.attempt} ({'good' if s.good else 'unproven'})" for s in self._states)
        where = "in host memory" if self._states[-1].copy.home == "host" else "beside the model"
        base = f" ({in_words(self.base_nbytes)} of it frozen parameters, kept once)" if self.base_nbytes else ""
        return f"{len(self._states)} of {self._size} states, {in_words(self.nbytes)} {where}{base}: {told}"


def _allocate(into: Copy, look: Look, base: BaseCopy | None) -> Copy:
    """Have memory for the base that a look refers to, if that is still to be copied, and for all else."""
    if base is not None:
        base.allocate()
    return into.make_room(look)


def _is_shortage(error: Exception) -> bool:
    """Short of memory, told from other trouble with memory such as an illegal access."""
    said = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "out of memory" in said or "allocate" in said
