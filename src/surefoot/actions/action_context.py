"""The interface through which actions change a run, and the error for an action that cannot be done."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from surefoot.actions.step_overrides import OverrideApplier
from surefoot.checkpoint.snapshots import Snapshot, SnapshotRing


class CannotAct(Exception):
    """A decision cannot be carried out, and no part of it was; the message says why."""


class ActionContext(Protocol):
    """One training run, between a step and the next forward pass."""

    @property
    def ring(self) -> SnapshotRing | None: ...

    @property
    def overrides(self) -> OverrideApplier: ...

    def common_attempts(self, attempts: Sequence[int]) -> Sequence[int]:
        """The attempts that every rank passed; all ranks must call this."""
        ...

    def rewound(self, state: Snapshot) -> None:
        """Tell everything that follows the run that it continues from this state."""
        ...

    def reset_optimizers(self) -> None:
        """Clear the optimizers' state."""
        ...

    @property
    def scaler(self) -> Any:
        """The GradScaler in use, or None."""
        ...
