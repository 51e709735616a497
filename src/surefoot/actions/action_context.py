"""What an action may reach of a run, and how it says that it cannot be done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from surefoot.actions.step_overrides import OverrideApplier
from surefoot.checkpoint.snapshots import Snapshot, SnapshotRing


class CannotAct(Exception):
    """What was decided cannot be done, and nothing of it was; the message says why."""


class ActionContext(Protocol):
    """One run in training, between a step and the next forward pass."""

    @property
    def ring(self) -> SnapshotRing | None: ...

    @property
    def reins(self) -> OverrideApplier: ...

    def shared(self, attempts: Sequence[int]) -> Sequence[int]:
        """Those of these attempts that every process has named."""
        ...

    def went_back(self, state: Snapshot) -> None:
        """Everything that follows the run goes on from this state."""
        ...

    def empty(self) -> None:
        """Forget the optimizers' state."""
        ...

    @property
    def scaler(self) -> Any:
        """The GradScaler at work, or None."""
        ...
