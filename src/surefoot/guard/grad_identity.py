"""Recognises gradients: which were discarded without a step, changed by the loop, or left over from the last step.

Each list holds a few gradients only: whatever a loop does to its gradients, it does to all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from surefoot.measure.layout import to_local
from surefoot.measure.stats_torch import flat_values

SAMPLE = 8
"""Gradients that are remembered of all."""


class SeenGrad:
    """The gradient that a parameter has now, to be recognised later; does not keep it alive.

    An address would not do: the memory of a freed gradient may be given to the next one.
    """

    __slots__ = ("_gradient", "_version", "param")

    def __init__(self, param: Tensor, gradient: Tensor) -> None:
        self.param = param
        self._gradient = TensorWeakRef(gradient)
        self._version = gradient._version

    def unchanged(self) -> bool:
        """Whether the parameter still has this very tensor, and nobody has written to it."""
        gradient = self.param.grad
        return gradient is not None and gradient is self._gradient() and gradient._version == self._version

    def nonzero(self) -> bool:
        """Whether the parameter's gradient has a value other than 0; waits for the device."""
        gradient = self.param.grad
        return gradient is not None and bool(flat_values(to_local(gradient)).any())


def see_grads(params: Sequence[Tensor]) -> list[SeenGrad]:
    """Remember the first few gradients of these parameters."""
    return list(itertools.islice((SeenGrad(p, p.grad) for p in params if p.grad is not None), SAMPLE))


def changed(grads: Sequence[SeenGrad]) -> bool:
    return not all(grad.unchanged() for grad in grads)


def discarded(grads: Sequence[SeenGrad]) -> bool:
    """Whether the gradients are gone: set to None, or to zero in place.

    Telling zeroed gradients from clipped ones waits for the device, but only between two backwards without a step.
    """
    if any(seen.param.grad is None for seen in grads):
        return all(seen.param.grad is None for seen in grads)
    touched = [g for seen in grads if (g := seen.param.grad) is not None and not seen.unchanged()]
    return bool(touched) and not any(bool(to_local(g).any()) for g in touched)


def stale(grads: Sequence[SeenGrad], *, check_values: bool) -> bool:
    """Whether the gradients of the last step are still there, as backward begins to add to them.

    Some loops zero gradients behind torch's back, which `check_values` finds; it waits for the device, and only where
    the tensors are the same. With several ranks each would find something else in its shard, so they do not look.
    """
    same = all(grad.unchanged() for grad in grads)
    return same and (not check_values or any(grad.nonzero() for grad in grads))
