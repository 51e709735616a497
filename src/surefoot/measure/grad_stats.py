"""Everything measured in one step, kept in one block of device memory that leaves it in one copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from struct import Struct

import numpy as np
import torch
from torch import Tensor

from surefoot.measure.block_layout import (
    HEAD,
    MICROS,
    Pass,
    Summariser,
    SummarySlot,
    fused_summariser,
    portable_summariser,
)
from surefoot.measure.cross_rank import Ranks, merge_parts, ranks_of
from surefoot.measure.layout import Layout, gradients, local
from surefoot.measure.rank_agreement import HostNumbers, agree
from surefoot.measure.replica_checksum import ReplicaChecksum, checksum
from surefoot.measure.stats_torch import TorchStats
from surefoot.records import LAYER_STATS

VERDICT = 13
"""Float64 places at the start of the block that the gate writes its decision to."""


SHARED = slice(SummarySlot.UNMOVED, HEAD)
"""Places of the summary that are read as they are, by all processes alike: the mean over those that measure."""

_NO_RANKS = np.zeros(0)


@dataclass(frozen=True, slots=True)
class Block:
    """The parts of one measured block on the device."""

    verdict: Tensor
    summary: Tensor
    buffers: Tensor
    """For each buffer that is checked, how many of its values became non-finite; see `Head.BAD_BUFFERS`."""
    micros: Tensor
    heads: Tensor
    """The first places of the summary of each process; empty where there is only one."""
    told: Tensor
    """What each process knows besides, see `HostNumbers`."""
    stats: Tensor


class HostBlock:
    """The same on the host: the parts that every row needs, and the others when somebody asks for them."""

    __slots__ = ("_numbers", "_raw", "_tail", "agreed", "head", "losses", "replicas", "stats", "verdict")

    def __init__(self, raw: np.ndarray, numbers: Struct, tail: tuple[int, ...], tensors: int) -> None:
        self._raw, self._numbers, self._tail = raw, numbers, tail
        found = numbers.unpack_from(raw.data)
        self.verdict: tuple[float, ...] = found[:VERDICT]
        self.head: tuple[float, ...] = found[VERDICT:]
        """The first places of the summary."""
        shape = (tensors, len(LAYER_STATS))
        self.stats = np.ndarray(shape, np.float32, raw, len(raw) - 4 * tensors * len(LAYER_STATS))
        self.losses = self.agreed = _NO_RANKS
        """Loss of each process, and what they agree on, see `Agreed`; empty where there is only one."""
        self.replicas = _NO_RANKS
        """Checksum and norm of each process's replicated weights, NaN for one that has lost its protection."""
        if tail[3] > tail[2]:
            with np.errstate(all="ignore"):  # values that are not finite are what it is about
                self._read_ranks()

    def _read_ranks(self) -> None:
        heads = self._real[self._tail[2] : self._tail[3]].reshape(-1, HEAD)
        alive = heads[:, SummarySlot.ALIVE] > 0
        self.losses = heads[:, SummarySlot.LOSS]
        self.agreed, self.replicas = agree(self._real[self._tail[3] :].reshape(len(heads), -1), alive)
        shared = heads[alive, SHARED]
        unmoved = shared[~np.isnan(shared[:, 0]), 0]  # of processes that hold weights which count
        told = float(unmoved.mean()) if len(unmoved) else math.nan
        self.head = (*self.head[: SummarySlot.UNMOVED], told, *shared[:, 1:].mean(0).tolist())

    @property
    def summary(self) -> np.ndarray:
        return self._real[VERDICT : self._tail[0]]

    @property
    def buffers(self) -> np.ndarray:
        """For each buffer that is checked, how many of its values became non-finite."""
        return self._real[self._tail[0] : self._tail[1]]

    @property
    def micros(self) -> np.ndarray:
        return self._real[self._tail[1] : self._tail[2]].reshape(MICROS, 3)

    @property
    def _real(self) -> np.ndarray:
        """All before the statistics."""
        kind = np.float64 if self._numbers.format.endswith("d") else np.float32
        return self._raw[: len(self._raw) - self.stats.nbytes].view(kind)


class GradStats:
    """Measures gradients and weights of one layout into its block; never waits for the device."""

    def __init__(self, layout: Layout, units: Sequence[slice], device: torch.device, *, buffers: int = 0) -> None:
        self.layout = layout
        self.device = device
        self._units = tuple(units)
        self.ranks: Ranks = ranks_of(layout, device)
        self.micro = 0
        """Micro-batches measured since the last update."""
        self.present: tuple[bool, ...] = ()
        """Which tensors had a gradient when they were last measured."""
        self._real = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
        world, optimizers = self.ranks.world, len(layout.groups)
        self.host = HostNumbers(optimizers, self._real, device) if world > 1 else None
        """What this process tells the others besides what it measures; None when there are none."""
        self._handed: Tensor | None = None
        """Checksum of the gradients that the optimizer is handed, where they have changed since backward."""
        self.replicas = ReplicaChecksum(layout.params, self.ranks.replicated, device)
        heads, told = (0, 0) if self.host is None else (world * HEAD, world * self.host.values.numel())
        self._widths = (VERDICT, HEAD + 2 * len(units), buffers, 3 * MICROS, heads, told)
        self._tensors = len(layout.names)
        self._numbers = Struct(f"={VERDICT + HEAD}{'d' if self._real is torch.float64 else 'f'}")
        """What every row needs, at the start of the block."""
        self._head = self._real.itemsize * sum(self._widths)
        """Bytes before the statistics."""
        self.raw = torch.zeros(self._head + 4 * 8 * self._tensors, dtype=torch.uint8, device=device)
        self.block = self._cut()
        self.block.summary[SummarySlot.ALIVE] = 1.0
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
        parts = self.raw[: self._head].view(self._real).split(self._widths)
        verdict, summary, buffers, micros, heads, told = parts
        stats = self.raw[self._head :].view(torch.float32).view(self._tensors, len(LAYER_STATS))
        world = self.ranks.world
        return Block(
            verdict, summary, buffers, micros.view(MICROS, 3), heads.view(world, -1), told.view(world, -1), stats
        )

    def unpack(self, raw: np.ndarray) -> HostBlock:
        """The parts of a block that has arrived on the host."""
        tail = tuple(accumulate(self._widths))[1:]
        return HostBlock(raw, self._numbers, tail, self._tensors)

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
            self.block.summary[: SummarySlot.ALIVE] = 0.0  # nobody watched: there is no loss to write over the last one
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
                self._handed = checksum(torch.stack(applied), self._real)
                parts = self.ranks.world if self.ranks.parts is not None else 1  # of which the mean will be taken
                self.block.summary[SummarySlot.APPLIED] = torch.stack(applied).sum() * parts

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
        block, ranks, host = self.block, self.ranks, self.host
        if host is None:
            return block.summary
        sharded = ranks.parts is not None
        if sharded:
            host.gradients.zero_()  # parts of the ranks differ, and what is made of them is the same on all
        else:
            host.gradients.copy_(checksum(self._local, self._real))
            if self._handed is not None:
                host.gradients[1] = self._handed
        self._handed = None
        parts = [block.summary[:HEAD], self._local.flatten()] if sharded else [block.summary]
        packets = ranks.gather(torch.cat([*parts, block.buffers, host.values]).to(self._real))
        sizes = [sum(part.numel() for part in parts), block.buffers.numel(), host.values.numel()]
        gathered, buffers, told = packets.split(sizes, dim=1)
        if block.buffers.numel():  # all processes name the same buffers
            block.buffers.copy_(buffers.amax(0))
        block.heads.copy_(gathered[:, :HEAD])
        block.told.copy_(told)
        if ranks.parts is None:
            totals = gathered.sum(0)
            totals[HEAD + 1 :: 2] = gathered[:, HEAD + 1 :: 2].amax(0)  # replicas hold the same bad values
            return totals
        heads, stats = gathered[:, :HEAD], gathered[:, HEAD:].reshape(ranks.world, self._tensors, -1)
        block.stats.copy_(merge_parts(stats, ranks.parts))
        totals = torch.cat([heads.sum(0), block.summary[HEAD:]])
        aside = torch.empty_like(block.micros)
        self._summarise(block.stats, once=self._all, loss=None, summary=totals, micros=aside, micro=0)
        return totals

    def stand_in(self) -> None:
        """Take part in the collective of a step with nothing to say, so that the other processes do not hang."""
        if self.host is not None:
            sharded = self.ranks.parts is not None
            size = HEAD + self._local.numel() if sharded else self.block.summary.numel()
            size += self.block.buffers.numel() + self.host.values.numel()
            self.ranks.gather(torch.zeros(size, dtype=self._real, device=self.device))

    def begin(self) -> None:
        """Start counting micro-batches for the next update; the first of them writes over the sums of the last."""
        self.micro = 0

    def compare_replicas(self) -> bool:
        """Measure a checksum of the replicated weights, for the next gather; False when nothing is replicated."""
        if self.host is None or not self.replicas.covers:
            return False
        self.replicas.measure(self.host.replicas)
        return True

    def measure_weights(
        self, change: Tensor, sampled: Tensor, buffers: Sequence[Tensor], *, own: Tensor | None = None
    ) -> None:
        """Norm and non-finite count of the weights, into the summary of the next step; `own` marks the tensors that
        count where that is not all of them."""
        with torch.no_grad():
            stats = self._weights
            self._rows([local(p.detach()) for p in self.layout.params], out=stats, scale=None)
            summary, once = self.block.summary, self.ranks.once != 0
            once = once if own is None else once & own
            summary[SummarySlot.WEIGHTS] = stats[:, 0].to(self._real).square().where(once, 0.0).sum()
            bad = stats[:, 5].where(once, 0.0).sum()
            for b in buffers:
                if b.is_floating_point():
                    bad = bad + (~local(b).isfinite()).sum()
            summary[SummarySlot.BAD_WEIGHTS] = bad
            summary[SummarySlot.CHANGE] = change
            summary[SummarySlot.SAMPLED] = sampled


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
        from surefoot.measure.stats_triton import TritonStats

        return TritonStats(numels, device)
    return TorchStats(numels, device)
