"""Finds the samples of a batch that make its loss or gradients non-finite or huge."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from surefoot.checkpoint.rng import RngStates, set_rng_states
from surefoot.measure.layout import to_local
from surefoot.origin.batch_rows import num_samples, only_samples
from surefoot.origin.op_trace import TracedOp
from surefoot.origin.passes import StepFn, gradients, loss_of

Samples = tuple[int, ...]


class SampleSearch:
    """Runs parts of a batch until the samples that are to blame are found, in 2 log2(samples) forward passes at most.

    Parts of a batch are filled up with the same samples again: shapes, and with them padding, stay as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        step_fn: StepFn,
        rng_states: RngStates,
        *,
        backward: bool,
        max_norm: float = math.inf,
        loss_factor: float = 1.0,
        out_of_time: Callable[[], bool] = lambda: False,
    ) -> None:
        self._model, self._batch, self._step_fn, self._rng_states = model, batch, step_fn, rng_states
        self._backward, self._max_norm, self._loss_factor = backward, max_norm, loss_factor
        self._params = [p for p in model.parameters() if p.requires_grad]
        self._out_of_time = out_of_time
        self.size = num_samples(batch)
        self._left = 2 * max(1, math.ceil(math.log2(max(self.size, 2))))
        self.forwards = 0

    def run(self, candidates: Iterable[int] = ()) -> Samples:
        """The samples without which the rest of the batch is healthy; none where no few of them are to blame.

        `candidates` are those whose rows an operation was seen to spoil; where they turn out to be the ones, two
        forward passes prove it.
        """
        suspects = sorted({i for i in candidates if 0 <= i < self.size})
        if self.size < 2 or len(suspects) == self.size:
            return ()
        if suspects and self._are_to_blame(suspects):
            return tuple(suspects)
        found: list[int] = []
        rest = [*range(self.size)]
        while rest and (culprit := self._bisect(rest)) is not None:
            found.append(culprit)
            rest.remove(culprit)
            # Two samples are told apart in one forward pass each; a larger batch leaves some for the rest.
            healthy = self.size == 2 if self._left <= 0 else not self._is_bad(rest)
            if healthy:
                return tuple(sorted(found))
        return ()

    def _are_to_blame(self, suspects: list[int]) -> bool:
        rest = [i for i in range(self.size) if i not in set(suspects)]
        return not self._is_bad(rest) and self._left > 0 and self._is_bad(suspects)

    def _bisect(self, samples: list[int]) -> int | None:
        """One bad sample among these, of which it is known that together they are bad; None where it gets lost."""
        shown = False
        while len(samples) > 1:
            if self._left <= 0 or self._out_of_time():
                return None
            half = samples[: len(samples) // 2]
            shown = self._is_bad(half)
            samples = half if shown else samples[len(half) :]
        if not shown and (self._left <= 0 or not self._is_bad(samples)):
            return None  # each half alone is healthy: it is the mixture
        return samples[0]

    def _is_bad(self, samples: list[int]) -> bool:
        self.forwards += 1
        self._left -= 1
        set_rng_states(self._rng_states)
        loss = loss_of(self._model, only_samples(self._batch, samples), self._step_fn)
        if not bool(torch.isfinite(loss.detach())):
            return True
        if not self._backward:
            return False
        grads = [to_local(g.detach()) for g in gradients(loss * self._loss_factor, self._params)]
        norm = float(torch.nn.utils.get_total_norm(grads)) / self._loss_factor if grads else 0.0
        return not norm <= self._max_norm if math.isfinite(norm) else True


def rows_of(op: TracedOp, size: int) -> frozenset[int]:
    """The samples whose part of an operation's result is non-finite, where the result is laid out by sample."""
    shape = op.outputs[0].shape if op.outputs else ()
    if not shape or not size or shape[0] % size or not shape[0]:
        return frozenset()
    return frozenset(row // (shape[0] // size) for row in op.bad_rows)
