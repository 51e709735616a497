"""Everything measured in one step, kept in one block of device memory that leaves it in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct

import numpy as np
import torch
from torch import Tensor

from surefoot.measure.layout import Layout, gradients, local
from surefoot.measure.portable import PortablePass
from surefoot.measure.ranks import Ranks, merge_parts, ranks_of, split_packet
from surefoot.measure.summary import (
    HEAD,
    MICROS,
    Head,
    Pass,
    Summariser,
    fused_summariser,
    portable_summariser,
)
from surefoot.records import LAYER_STATS

VERDICT = 13
"""Float64 places at the start of the block that the gate writes its decision to."""


SHARED = slice(Head.UNMOVED, HEAD)
"""Places of the summary that are read as they are, by all processes alike: the mean over them."""


@dataclass(frozen=True, slots=True)
class Block:
    """The parts of one measured block on the device."""

    verdict: Tensor
    summary: Tensor
    micros: Tensor
    losses: Tensor
    """Loss of each process."""
    stats: Tensor


class Arrived:
    """The same on the host: the parts that every row needs, and the others when somebody asks for them."""

    __slots__ = ("_numbers", "_raw", "_tail", "head", "stats", "verdict")

    def __init__(self, raw: np.ndarray, numbers: Struct, tail: tuple[int, int], tensors: int) -> None:
        self._raw, self._numbers, self._tail = raw, numbers, tail
        found = numbers.unpack_from(raw.data)
        self.verdict: tuple[float, ...] = found[:VERDICT]
        self.head: tuple[float, ...] = found[VERDICT:]
        """The first places of the summary."""
        shape = (tensors, len(LAYER_STATS))
        self.stats = np.ndarray(shape, np.float32, raw, len(raw) - 4 * tensors * len(LAYER_STATS))

    @property
    def summary(self) -> np.ndarray:
        return self._real[VERDICT : self._tail[0]]

    @property
    def micros(self) -> np.ndarray:
        return self._real[self._tail[0] : self._tail[1]].reshape(MICROS, 3)

    @property
    def losses(self) -> np.ndarray:
        """Loss of each process."""
        return self._real[self._tail[1] :]

    @property
    def _real(self) -> np.ndarray:
        """All before the statistics."""
        kind = np.float64 if self._numbers.format.endswith("d") else np.float32
        return self._raw[: len(self._raw) - self.stats.nbytes].view(kind)


class Meter:
    """Measures gradients and weights of one layout into its block; never waits for the device."""

    def __init__(self, layout: Layout, units: Sequence[slice], device: torch.device) -> None:
        self.layout = layout
        self.device = device
        self._units = tuple(units)
        self.ranks: Ranks = ranks_of(layout, device)
        self.micro = 0
        """Micro-batches measured since the last update."""
        self.present: tuple[bool, ...] = ()
        """Which tensors had a gradient when they were last measured."""
        self._real = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
        self._widths = (VERDICT, HEAD + 2 * len(units), 3 * MICROS, self.ranks.world)
        self._tensors = len(layout.names)
        self._numbers = Struct(f"={VERDICT + HEAD}{'d' if self._real is torch.float64 else 'f'}")
        """What every row needs, at the start of the block."""
        self._head = self._real.itemsize * sum(self._widths)
        """Bytes before the statistics."""
        self.raw = torch.zeros(self._head + 4 * 8 * self._tensors, dtype=torch.uint8, device=device)
        self.block = self._cut()
        self.block.summary[Head.ALIVE] = 1.0
        sharded = self.ranks.parts is not None
        self._local = torch.zeros_like(self.block.stats) if sharded else self.block.stats
        self._all = torch.ones_like(self.ranks.once)
        self._weights = torch.zeros_like(self._local)
        """Statistics of the weights, when they are measured."""
        self._homes = _by_device(layout)
        sizes = layout.local_numels
        self._passes = [_pass_for([sizes[i] for i in where], home) for home, where in self._homes]
        self._places = [torch.tensor(where, device=device) for _, where in self._homes]
        self._summarise: Summariser = (
            fused_summariser(units, device) if has_triton(device) else portable_summariser(units)
        )

    def _cut(self) -> Block:
        verdict, summary, micros, losses = self.raw[: self._head].view(self._real).split(self._widths)
        stats = self.raw[self._head :].view(torch.float32).view(self._tensors, len(LAYER_STATS))
        return Block(verdict, summary, micros.view(MICROS, 3), losses, stats)

    def unpack(self, raw: np.ndarray) -> Arrived:
        """The parts of a block that has arrived on the host."""
        first = VERDICT + self._widths[1]
        return Arrived(raw, self._numbers, (first, first + 3 * MICROS), self._tensors)

    def measure(self, loss: Tensor | None, *, weight: Tensor | None = None, scale: Tensor | None) -> None:
        """Measure all gradients as they are now: at the end of a backward, or before a step nobody watched.

        The loss counts with its `weight` in the gradients, which backward began with.
        """
        if torch.is_grad_enabled():  # to ask is quicker than to say so again
            with torch.no_grad():
                return self.measure(loss, weight=weight, scale=scale)
        found = gradients(self.layout.params)
        self.present = tuple([g is not None for g in found])
        self._rows(found, out=self._local, scale=scale)
        if loss is None and self.micro == 0:
            self.block.summary[: Head.ALIVE] = 0.0  # nobody watched: there is no loss to write over the last one
        if loss is not None and loss.device != self.device:
            loss, weight = (loss if weight is None else loss * weight).to(self.device, non_blocking=True), None
        block = self.block
        self._summarise(
            self._local,
            once=self.ranks.once,
            loss=loss,
            weight=weight,
            summary=block.summary,
            micros=block.micros,
            micro=self.micro,
        )
        self.micro += loss is not None
        return None

    def look_again(self) -> None:
        """Count tensors that have gone bad since they were measured, as non-finite values of their unit."""
        with torch.no_grad():
            found = gradients(self.layout.params)
            applied: list[Tensor] = []
            for u, span in enumerate(self._units):
                here = [g for g in found[span] if g is not None and g.layout is torch.strided and g.numel()]
                norms = [n.to(self.device, self._real, non_blocking=True) for n in _norms(here)]
                if norms:
                    each = torch.stack(norms)
                    bad = (~each.isfinite()).sum()
                    self.block.summary[HEAD + 2 * u + 1] += bad
                    applied.append(each.square().sum())
            if applied:
                parts = self.ranks.world if self.ranks.parts is not None else 1  # of which the mean will be taken
                self.block.summary[Head.APPLIED] = torch.stack(applied).sum() * parts

    def _rows(self, tensors: Sequence[Tensor | None], *, out: Tensor, scale: Tensor | None) -> None:
        if len(self._passes) == 1:
            self._passes[0].measure(tensors, out=out, scale=scale)
            return
        for (home, where), places, each in zip(self._homes, self._places, self._passes, strict=True):
            part = torch.empty(len(where), len(LAYER_STATS), device=home)
            moved = None if scale is None else scale.to(home, non_blocking=True)
            each.measure([tensors[i] for i in where], out=part, scale=moved)
            out[places] = part.to(self.device, non_blocking=True)

    def totals(self) -> Tensor:
        """The summary over all processes: the one collective of a step, none when there is one process."""
        block, ranks = self.block, self.ranks
        if ranks.world == 1:
            return block.summary
        sharded = ranks.parts is not None
        packet = torch.cat([block.summary[:HEAD], self._local.flatten()]) if sharded else block.summary
        gathered = ranks.gather(packet.to(self._real))
        block.losses.copy_(gathered[:, Head.LOSS])
        block.summary[SHARED] = gathered[:, SHARED].mean(0)
        if ranks.parts is None:
            totals = gathered.sum(0)
            totals[HEAD + 1 :: 2] = gathered[:, HEAD + 1 :: 2].amax(0)  # replicas hold the same bad values
            return totals
        heads, stats = split_packet(gathered, self._tensors)
        block.stats.copy_(merge_parts(stats, ranks.parts))
        totals = torch.cat([heads.sum(0), block.summary[HEAD:]])
        aside = torch.empty_like(block.micros)
        self._summarise(block.stats, once=self._all, loss=None, summary=totals, micros=aside, micro=0)
        return totals

    def stand_in(self) -> None:
        """Take part in the collective of a step with nothing to say, so that the other processes do not hang."""
        if self.ranks.world > 1:
            sharded = self.ranks.parts is not None
            size = HEAD + self._local.numel() if sharded else self.block.summary.numel()
            self.ranks.gather(torch.zeros(size, dtype=self._real, device=self.device))

    def begin(self) -> None:
        """Start counting micro-batches for the next update; the first of them writes over the sums of the last."""
        self.micro = 0

    def measure_weights(self, change: Tensor, sampled: Tensor, buffers: Sequence[Tensor]) -> None:
        """Norm and non-finite count of the weights, into the summary of the next step."""
        with torch.no_grad():
            stats = self._weights
            self._rows([local(p.detach()) for p in self.layout.params], out=stats, scale=None)
            summary, once = self.block.summary, self.ranks.once != 0
            summary[Head.WEIGHTS] = stats[:, 0].to(self._real).square().where(once, 0.0).sum()
            bad = stats[:, 5].where(once, 0.0).sum()
            for b in buffers:
                if b.is_floating_point():
                    bad = bad + (~local(b).isfinite()).sum()
            summary[Head.BAD_WEIGHTS] = bad
            summary[Head.CHANGE] = change
            summary[Head.SAMPLED] = sampled


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    """Norms of all tensors, in few launches."""
    return list(torch._foreach_norm(tensors)) if tensors else []


def _by_device(layout: Layout) -> list[tuple[torch.device, list[int]]]:
    homes: dict[torch.device, list[int]] = {}
    for i, p in enumerate(layout.params):
        homes.setdefault(local(p).device, []).append(i)
    return list(homes.items())


def has_triton(device: torch.device) -> bool:
    """Whether kernels can run on this device."""
    if device.type != "cuda":
        return False
    from torch.utils._triton import has_triton as torch_has_triton

    return torch_has_triton()


def _pass_for(numels: Sequence[int], device: torch.device) -> Pass:
    if has_triton(device):
        from surefoot.measure.fused import FusedPass

        return FusedPass(numels, device)
    return PortablePass(numels, device)
