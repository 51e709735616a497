"""A save on its way to the disk: the captured state, its result, and what a loop had before it fetched a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from surefoot.checkpoint.copies import LiveState, StateCopy
from surefoot.checkpoint.format.param_names import StateNames
from surefoot.checkpoint.replay_check import ReplayBatch
from surefoot.checkpoint.store import StoredCheckpoint
from surefoot.checkpoint.tree import detach_tensors


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


@dataclass(frozen=True, slots=True)
class EarlierState:
    """What changes when a loop fetches its next batch, as it was before."""

    extra: Mapping[str, Any]
    """States by the name of what they belong to."""
    rng_states: list[tuple[Any, Any]] | None = None
    """None if no random number was drawn since."""
    buffers: Sequence[tuple[Tensor, Tensor]] = ()
    """Buffers that a forward pass has changed since, each with its earlier value."""
    inexact: tuple[str, ...] = ()
    """Why a run resumed from here may not reproduce the losses of the saved run."""

    def apply_to(self, live: LiveState) -> None:
        for buffer, earlier in self.buffers:
            live.replace_tensor(buffer, earlier)
        states = {name: detach_tensors(state, live.slot) for name, state in self.extra.items()}
        rng_states = live.rest.rng_states if self.rng_states is None else self.rng_states
        live.rest = replace(live.rest, extra={**live.rest.extra, **states}, rng_states=rng_states)
