"""What travels on the way to the disk: a copy of the run, what it was a moment earlier, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from surefoot.checkpoint.copies import Copy, Look
from surefoot.checkpoint.format.param_names import Names
from surefoot.checkpoint.replay_check import Probed
from surefoot.checkpoint.store import StoredCheckpoint
from surefoot.checkpoint.tree import freeze


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingSave:
    """A run as it was after an attempt, on its way to the disk."""

    attempt: int
    kind: str
    copy: Copy
    names: Names
    """Found while no process used the model: spread weights are other tensors while they are gathered."""
    meeting: int = 0
    """Which of the saves of this run it is, counted alike by all processes."""
    ready: tuple[Any, ...] = ()
    """Events on the devices after which the copy is there."""
    probed: Probed | None = None
    """A batch with the loss it has in this state."""
    lent: bool = False
    """Its memory is somebody else's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a save."""

    step: int
    attempt: int
    kind: str
    kept: StoredCheckpoint | None = None
    """The checkpoint; only the first process has it."""
    error: str = ""
    seconds: float = 0.0
    left_out: tuple[str, ...] = ()
    """What of the run cannot be saved."""
    removed: tuple[str, ...] = ()
    trouble: str = ""
    """Why older checkpoints could not go."""
    probe: float | None = None
    """Seconds that the training waited for the loss of a batch to be saved with it; None if there is none."""


@dataclass(frozen=True, slots=True)
class EarlierState:
    """What moves on when a loop fetches its next batch, as it was before that."""

    extra: Mapping[str, Any]
    """States by the name of what they are of."""
    chance: list[tuple[Any, Any]] | None = None
    """Random numbers; None where nothing drew any since."""
    buffers: Sequence[tuple[Tensor, Tensor]] = ()
    """Buffers that a forward pass has changed since, and what they were."""
    inexact: tuple[str, ...] = ()
    """Why a run resumed from here may not repeat the losses of the run that was saved."""

    def put_into(self, look: Look) -> None:
        for live, before in self.buffers:
            look.instead(live, before)
        states = {name: freeze(state, look.slot) for name, state in self.extra.items()}
        chance = look.frozen.chance if self.chance is None else self.chance
        look.frozen = replace(look.frozen, extra={**look.frozen.extra, **states}, chance=chance)
