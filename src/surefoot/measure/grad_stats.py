"""Measures gradients and weights into one block of device memory and combines the summaries of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import is_not

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from surefoot.measure.block_layout import (
    NONFINITE_COLUMN,
    NORM_COLUMN,
    UNITS_START,
    BlockLayout,
    SummarySlot,
)
from surefoot.measure.cross_rank import Ranks, ReplicaChecksum, SharedValues, checksum, find_ranks, merge_parts
from surefoot.measure.layout import ParamLayout, local_grads, to_local
from surefoot.measure.stats_torch import StatsBackend, Summariser, TorchStats, flat_values, torch_summariser
from surefoot.records import LAYER_STATS

REMEMBERED_GRADS = 8
"""Gradients that are remembered of all: whatever a loop does to its gradients, it does to all of them."""


class GradStats:
    """Measures gradients and weights of one layout into its block; never waits for the device."""

    def __init__(self, layout: ParamLayout, units: Sequence[slice], device: torch.device, *, buffers: int = 0) -> None:
        self.layout = layout
        self.device = device
        self._units = tuple(units)
        self.ranks: Ranks = find_ranks(layout, device)
        self.num_microbatches = 0
        """Microbatches measured since the last update; set to 0 to begin the next, whose first overwrites the sums."""
        self._loss_tokens: Tensor | float = 0.0
        """Tokens of the current update, where its losses are sums over them."""
        self.present: tuple[bool, ...] = ()
        """Which tensors had a gradient when they were last measured."""
        self._dtype = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
        world_size, optimizers = self.ranks.world_size, len(layout.group_spans)
        self.shared_values = SharedValues(optimizers, self._dtype, device) if world_size > 1 else None
        """Host-side numbers that this rank sends with its summary; None on a single rank."""
        self._applied_checksum: Tensor | None = None
        """Checksum of the gradients handed to the optimizer, when the loop changed them after backward."""
        self.replicas = ReplicaChecksum(layout.params, self.ranks.replicated, device)
        self.block_layout = BlockLayout(
            self._dtype,
            tensors=len(layout.names),
            units=len(units),
            buffers=buffers,
            world_size=world_size,
            optimizers=optimizers,
        )
        self.raw = torch.zeros(self.block_layout.nbytes, dtype=torch.uint8, device=device)
        self.block = self.block_layout.view_device(self.raw)
        self.block.summary[SummarySlot.ACTIVE_RANKS] = 1.0
        sharded = self.ranks.part_numels is not None
        self._local_stats = torch.zeros_like(self.block.stats) if sharded else self.block.stats
        self._all_owned = torch.ones_like(self.ranks.owned)
        self._weight_stats = torch.zeros_like(self._local_stats)
        """Statistics of the weights, when they are measured."""
        self._backend = _backend_for(layout, device)
        self._summarise: Summariser = _summariser_for(units, device)

    def measure(self, loss: Tensor | None, *, weight: Tensor | None = None, scale: Tensor | None) -> None:
        """Measure all gradients as they are now: after a backward, or before a step whose loss was not watched.

        The loss is multiplied by `weight`, the gradient that backward started from, so that it counts as it does in
        the gradients. `scale` is the loss scale to divide the gradients by.
        """
        if torch.is_grad_enabled():  # the check is cheaper than entering no_grad() again
            with torch.no_grad():
                return self.measure(loss, weight=weight, scale=scale)
        grads = local_grads(self.layout.params)
        self.present = tuple(map(is_not, grads, repeat(None)))
        self._backend.measure(grads, out=self._local_stats, scale=scale)
        if loss is None and self.num_microbatches == 0:
            # Without a watched loss nothing overwrites the sums of the last update.
            self.block.summary[: SummarySlot.ACTIVE_RANKS] = 0.0
        if loss is not None and loss.device != self.device:
            loss, weight = (loss if weight is None else loss * weight).to(self.device, non_blocking=True), None
        block = self.block
        self._summarise(
            self._local_stats,
            owned=self.ranks.owned,
            loss=loss,
            weight=weight,
            summary=block.summary,
            microbatches=block.microbatches,
            microbatch=self.num_microbatches,
        )
        self.num_microbatches += loss is not None
        return None

    def loss_per_token(self, loss: Tensor, tokens: Tensor | float, *, new_update: bool) -> Tensor:
        """What to add to the sum of the losses of this update, so that it becomes their sum per token."""
        first = new_update or self.num_microbatches == 0
        earlier = 0.0 if first else self._loss_tokens
        self._loss_tokens = earlier + tokens
        if first:
            return loss / tokens
        mean = self.block.summary[SummarySlot.LOSS].to(loss.device)
        return (loss - mean * tokens) / self._loss_tokens

    def recheck_grads(self) -> None:
        """Check gradients that the loop changed after backward: count non-finite tensors, and take their norm."""
        with torch.no_grad():
            grads = local_grads(self.layout.params)
            applied: list[Tensor] = []
            for u, span in enumerate(self._units):
                dense = [g for g in grads[span] if g is not None and g.layout is torch.strided and g.numel()]
                norms = [n.to(self.device, self._dtype, non_blocking=True) for n in _norms(dense)]
                if norms:
                    stacked = torch.stack(norms)
                    self.block.summary[UNITS_START + 2 * u + 1] += (~stacked.isfinite()).sum()
                    applied.append(stacked.square().sum())
            if applied:
                self._applied_checksum = checksum(torch.stack(applied), self._dtype)
                # The host averages this slot over the ranks; of sharded gradients it needs the sum.
                parts = self.ranks.world_size if self.ranks.part_numels is not None else 1
                self.block.summary[SummarySlot.APPLIED_SQUARES] = torch.stack(applied).sum() * parts

    def gather_totals(self) -> Tensor:
        """The summary over all ranks: the one collective of a step, none on a single rank."""
        block, ranks, shared = self.block, self.ranks, self.shared_values
        if shared is None:
            return block.summary
        sharded = ranks.part_numels is not None
        if sharded:
            shared.grad_checksums.zero_()  # the ranks' parts differ, and the totals made of them are the same on all
        else:
            shared.grad_checksums.copy_(checksum(self._local_stats, self._dtype))
            if self._applied_checksum is not None:
                shared.grad_checksums[1] = self._applied_checksum
        self._applied_checksum = None
        parts = [block.summary[:UNITS_START], self._local_stats.flatten()] if sharded else [block.summary]
        packets = ranks.gather(torch.cat([*parts, block.buffer_nonfinite, shared.values]).to(self._dtype))
        sizes = [sum(part.numel() for part in parts), block.buffer_nonfinite.numel(), shared.values.numel()]
        gathered, buffers, rank_values = packets.split(sizes, dim=1)
        if block.buffer_nonfinite.numel():  # all ranks check the same buffers
            block.buffer_nonfinite.copy_(buffers.amax(0))
        block.rank_summaries.copy_(gathered[:, :UNITS_START])
        block.rank_values.copy_(rank_values)
        if ranks.part_numels is None:
            totals = gathered.sum(0)
            # Replicas hold the same non-finite values: take the maximum, not the sum.
            totals[UNITS_START + 1 :: 2] = gathered[:, UNITS_START + 1 :: 2].amax(0)
            return totals
        summaries = gathered[:, :UNITS_START]
        stats = gathered[:, UNITS_START:].reshape(ranks.world_size, len(self.layout.names), -1)
        block.stats.copy_(merge_parts(stats, ranks.part_numels))
        totals = torch.cat([summaries.sum(0), block.summary[UNITS_START:]])
        scratch = torch.empty_like(block.microbatches)
        self._summarise(
            block.stats, owned=self._all_owned, loss=None, summary=totals, microbatches=scratch, microbatch=0
        )
        return totals

    def gather_zeros(self) -> None:
        """Take part in the collective of a step with zeros, so that the other ranks do not hang."""
        if self.shared_values is not None:
            sharded = self.ranks.part_numels is not None
            size = UNITS_START + self._local_stats.numel() if sharded else self.block.summary.numel()
            size += self.block.buffer_nonfinite.numel() + self.shared_values.values.numel()
            self.ranks.gather(torch.zeros(size, dtype=self._dtype, device=self.device))

    def checksum_replicas(self) -> bool:
        """Measure a checksum of the replicated weights for the next gather; False when nothing is replicated."""
        if self.shared_values is None or not self.replicas.enabled:
            return False
        self.replicas.measure(self.shared_values.replica_checksum)
        return True

    def measure_weights(
        self, change: Tensor, sampled: Tensor, buffers: Sequence[Tensor], *, own: Tensor | None = None
    ) -> None:
        """Norm and non-finite count of the weights, into the summary of the next step.

        `own` masks the tensors that count, when that is not all of them.
        """
        with torch.no_grad():
            stats = self._weight_stats
            self._backend.measure([to_local(p.detach()) for p in self.layout.params], out=stats, scale=None)
            summary, owned = self.block.summary, self.ranks.owned != 0
            owned = owned if own is None else owned & own
            squares = stats[:, NORM_COLUMN].to(self._dtype).square()
            summary[SummarySlot.PARAM_SQUARES] = squares.where(owned, 0.0).sum()
            nonfinite = stats[:, NONFINITE_COLUMN].where(owned, 0.0).sum()
            for buffer in buffers:
                if buffer.is_floating_point():
                    nonfinite = nonfinite + (~to_local(buffer).isfinite()).sum()
            summary[SummarySlot.NONFINITE_PARAMS] = nonfinite
            summary[SummarySlot.UPDATE_SQUARES] = change
            summary[SummarySlot.SAMPLED_SQUARES] = sampled


class SeenGrads:
    """The first few gradients as they are now, to be recognised later; does not keep them alive.

    Addresses would not do: the memory of a freed gradient may be given to the next one.
    """

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.seen: list[tuple[Tensor, TensorWeakRef, int]] = []
        for param in params:
            if (grad := param.grad) is not None:
                self.seen.append((param, TensorWeakRef(grad), grad._version))
                if len(self.seen) == REMEMBERED_GRADS:
                    break

    def unchanged(self) -> bool:
        """Whether each parameter still has this very tensor, and nobody has written to it."""
        for param, seen, version in self.seen:
            grad = param.grad
            if grad is None or grad is not seen() or grad._version != version:
                return False
        return True

    def any_nonzero(self) -> bool:
        """Whether any of the parameters' gradients has a value other than 0; waits for the device."""
        grads = [param.grad for param, _, _ in self.seen]
        return any(bool(flat_values(to_local(g)).any()) for g in grads if g is not None)

    def discarded(self) -> bool:
        """Whether the gradients are gone: set to None, or to zero in place.

        Telling zeroed gradients from clipped ones waits for the device, but only between two backwards without a step.
        """
        grads = [param.grad for param, _, _ in self.seen]
        if any(g is None for g in grads):
            return all(g is None for g in grads)
        touched = [
            g
            for g, (_, seen, version) in zip(grads, self.seen, strict=True)
            if g is not None and (g is not seen() or g._version != version)
        ]
        return bool(touched) and not any(bool(to_local(g).any()) for g in touched)


def _norms(tensors: list[Tensor]) -> list[Tensor]:
    """Norms of all tensors, in few launches."""
    return list(torch._foreach_norm(tensors)) if tensors else []


class SeveralDevices:
    """Measures tensors that lie on several devices, each with a backend of its own."""

    def __init__(self, parts: Sequence[tuple[torch.device, Sequence[int], StatsBackend]], device: torch.device) -> None:
        self._parts = [(place, indices, torch.tensor(indices, device=device), b) for place, indices, b in parts]
        self._device = device

    def measure(self, tensors: Sequence[Tensor | None], *, out: Tensor, scale: Tensor | None = None) -> None:
        for place, indices, rows, backend in self._parts:
            part = torch.empty(len(indices), len(LAYER_STATS), device=place)
            moved = None if scale is None else scale.to(place, non_blocking=True)
            backend.measure([tensors[i] for i in indices], out=part, scale=moved)
            out[rows] = part.to(self._device, non_blocking=True)


def has_triton(device: torch.device) -> bool:
    """Whether Triton kernels can run on this device."""
    if device.type != "cuda":
        return False
    from torch.utils._triton import has_triton as torch_has_triton

    return torch_has_triton()


def _backend_for(layout: ParamLayout, device: torch.device) -> StatsBackend:
    indices: dict[torch.device, list[int]] = {}
    for i, p in enumerate(layout.params):
        indices.setdefault(to_local(p).device, []).append(i)
    numels = layout.local_numels
    parts = [(place, at, _backend_on(place, [numels[i] for i in at])) for place, at in indices.items()]
    return parts[0][2] if len(parts) == 1 else SeveralDevices(parts, device)


def _backend_on(device: torch.device, numels: Sequence[int]) -> StatsBackend:
    if has_triton(device):
        from surefoot.measure.stats_triton import TritonStats

        return TritonStats(numels, device)
    return TorchStats(numels, device)


def _summariser_for(units: Sequence[slice], device: torch.device) -> Summariser:
    if has_triton(device):
        from surefoot.measure.stats_triton import triton_summariser

        return triton_summariser(units, device)
    return torch_summariser(units)
