"""One attempt at an update, or at a batch of an evaluation, that may run out of memory."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from torch import Tensor
from torch.optim import Optimizer

from surefoot.guard.out_of_memory import first_line, is_out_of_memory
from surefoot.train.split_batch import Piece


class Phase(StrEnum):
    """Where memory ran out."""

    COPY = "on the way of a batch to the device"
    FORWARD = "in forward"
    BACKWARD = "in backward"
    STEP = "in the optimizer's step"


class UpdateAttempt:
    """Its micro-batches, and how far it came; as a context manager it keeps an out-of-memory error to itself."""

    def __init__(self, pieces: Sequence[Piece], num_batches: int, *, catch: bool) -> None:
        self.pieces, self.num_batches = pieces, num_batches
        self.phase = Phase.COPY
        self.number = 0
        """The micro-batch it is at, from 1 on."""
        self.failure: str | None = None
        """The message of the out-of-memory error; None without one."""
        self.step: StepWatch | None = None
        """Watches the optimizers once their steps begin."""
        self.losses: list[tuple[Tensor, float]] = []
        """In an evaluation: loss and count of each piece."""
        self._catch = catch

    @property
    def at_last(self) -> bool:
        """It is at its last micro-batch, in whose backward the ranks exchange gradients."""
        return self.number == len(self.pieces)

    def begin(self, number: int) -> None:
        """A micro-batch begins."""
        self.number, self.phase = number, Phase.COPY

    def begin_step(self, optimizers: Sequence[Optimizer]) -> None:
        """The optimizers are about to step."""
        self.phase, self.step = Phase.STEP, StepWatch(optimizers)

    def __enter__(self) -> UpdateAttempt:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if error is None or not self._catch or not is_out_of_memory(error):
            return False
        # Only the text is kept: the error holds the frames of the failed attempt, and they hold its memory.
        self.failure = first_line(error)
        self.losses = []
        return True


class StepWatch:
    """Whether a step that failed has changed anything: the version of one weight of each group, and of its state.

    Optimizers change the tensors of a group together, or from the first one on.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._known = [len(o.state) for o in optimizers]
        firsts = [
            (o, next((p for p in group["params"] if p.grad is not None), None))
            for o in optimizers
            for group in o.param_groups
        ]
        tensors = [t for o, p in firsts if p is not None for t in (p, *o.state.get(p, {}).values())]
        self._versions = [(t, t._version) for t in tensors if isinstance(t, Tensor)]

    def unchanged(self) -> bool:
        """Whether weights and state are as they were; state that the step has only begun to make is removed."""
        if any(t._version != version for t, version in self._versions):
            return False
        for o, known in zip(self._optimizers, self._known, strict=True):
            for p in list(o.state)[known:]:
                del o.state[p]
        return True
