"""From one row a tensor to the few numbers a decision needs, still on the device."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Protocol

import torch
from torch import Tensor

MICROS = 64
"""Micro-batches of one update that are told apart; later ones share the last place."""


class SummarySlot(IntEnum):
    """The first places of a summary; after them two for each unit: sum of squares, count of non-finite values."""

    LOSS = 0
    """Sum over the micro-batches, each with the weight it has in the gradients."""
    MICROS = 1
    """How many micro-batches that sum holds."""
    ALIVE = 2
    """1 from each process that still measures."""
    WEIGHTS = 3
    """Sum of squares of the weights."""
    BAD_WEIGHTS = 4
    """Non-finite values in weights and buffers."""
    CHANGE = 5
    """Sum of squares of what the last update changed, on the sampled weights."""
    SAMPLED = 6
    """Sum of squares of the sampled weights."""
    UNMOVED = 7
    """Share of the sampled weights that a whole step left as they were."""
    INPUT_MEAN = 8
    INPUT_SPREAD = 9
    INPUT_TOP = 10
    """Of the batch; see `Row`."""
    APPLIED = 11
    """Sum of squares of the gradients as the optimizer was handed them, if the loop has changed them."""
    BUSY = 12
    """1 from each process that is still at a save: the next one begins when none is."""
    BAD_BUFFERS = 13
    """Values of buffers that were finite after the last accepted update and are not any more."""
    PROGRESS = 14
    """What the loop handed to `guard.watch(progress=...)`, the mean over the micro-batches so far."""


HEAD = len(SummarySlot)


class Pass(Protocol):
    """Measures a list of tensors into one row each."""

    def measure(self, tensors: Sequence[Tensor | None], *, out: Tensor, scale: Tensor | None = None) -> None: ...


class Summariser(Protocol):
    """Writes squares and counts of each unit into `summary`, adds the loss, and keeps a line for the micro-batch.

    A loss may come with its weight in the gradients, by which it is multiplied.
    """

    def __call__(
        self,
        stats: Tensor,
        *,
        once: Tensor,
        loss: Tensor | None,
        weight: Tensor | None = None,
        summary: Tensor,
        micros: Tensor,
        micro: int,
    ) -> None: ...


def portable_summariser(units: Sequence[slice]) -> Summariser:
    """The summariser in plain torch operations."""

    def summarise(
        stats: Tensor,
        *,
        once: Tensor,
        loss: Tensor | None,
        weight: Tensor | None = None,
        summary: Tensor,
        micros: Tensor,
        micro: int,
    ) -> None:
        squares = stats[:, 0].to(summary.dtype).square().where(once != 0, 0.0)
        bad = stats[:, 5].clamp(min=0)
        for u, span in enumerate(units):
            summary[HEAD + 2 * u] = squares[span].sum()
            summary[HEAD + 2 * u + 1] = bad[span].sum()
        place = micros[min(micro, MICROS - 1)]
        place[1] = summary[HEAD::2].sum()
        place[2] = summary[HEAD + 1 :: 2].sum()
        if loss is not None:
            loss = loss.reshape(()).to(summary.dtype)
            loss = loss if weight is None else loss * weight.reshape(()).to(summary.dtype)
            place[0] = loss
            summary[SummarySlot.LOSS] = loss + (summary[SummarySlot.LOSS] if micro else 0.0)
            summary[SummarySlot.MICROS] = micro + 1

    return summarise


def fused_summariser(units: Sequence[slice], device: torch.device) -> Summariser:
    """The same in one Triton launch."""
    from surefoot.measure import kernels
    from surefoot.triton_launch import Launch

    launch = Launch(kernels.summarise, device)
    spans = torch.tensor([[s.start, s.stop] for s in units], dtype=torch.int32, device=device)
    nothing = torch.zeros((), device=device)

    def summarise(
        stats: Tensor,
        *,
        once: Tensor,
        loss: Tensor | None,
        weight: Tensor | None = None,
        summary: Tensor,
        micros: Tensor,
        micro: int,
    ) -> None:
        where = None if loss is None else (loss.data_ptr(), loss.dtype)
        by = None if weight is None else weight.data_ptr()
        launch.at(
            (where, by, stats.data_ptr(), summary.data_ptr(), micros.data_ptr(), once.data_ptr(), micro),
            (1, 1, 1),
            stats,
            once,
            spans,
            len(units),
            nothing if loss is None else loss,
            nothing if weight is None else weight,
            summary,
            micros,
            micro,
            HEAD=HEAD,
            WATCHED=loss is not None,
            WEIGHTED=weight is not None,
            BLOCK=256,
        )

    return summarise
