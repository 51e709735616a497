"""Combines the numbers of all ranks: one small gather a step, after which every rank holds the same numbers.

Every number that is judged must be the same on all ranks: they act on it, and most actions need all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from surefoot.measure.block_layout import NUM_CHECKSUMS, settings_index
from surefoot.measure.layout import ParamLayout, owns_elements, to_local

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Newer torch has renamed it."""
_PADDING = -(1 << 62)
_HASH_FACTOR = 0x1E3779B97F4A7C15
_COLUMNS = 256
"""Neighbouring words are summed in different columns, so that changes next to each other do not cancel."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This rank, and how the ranks' parts of the tensors fit together."""

    rank: int
    world_size: int
    owned: Tensor
    """For each tensor, 1 when this rank's part is the one that counts."""
    part_numels: Tensor | None
    """Where tensors are sharded: for each rank and tensor, how many elements of its part count."""
    replicated: tuple[bool, ...]
    """Which tensors are whole on every rank, so that all ranks should hold the same values."""

    def gather(self, packet: Tensor) -> Tensor:
        """The packets of all ranks, one a row; the one collective of a step."""
        if self.world_size == 1:
            return packet[None]
        return _gather(packet, self.world_size)

    def intersect(self, numbers: Sequence[int], max_count: int) -> list[int]:
        """The numbers, at most `max_count` from each rank, that every rank passed; all ranks must call this."""
        if self.world_size == 1:
            return list(numbers)
        padded = [*numbers, *[_PADDING] * max_count][:max_count]
        rows = _gather(torch.tensor(padded, dtype=torch.int64, device=self.owned.device), self.world_size)
        return sorted(set.intersection(*(set(row) for row in rows.tolist())) - {_PADDING})

    def broadcast(self, value: object) -> Any:
        """Rank 0's value, on all ranks."""
        values = [value]
        if self.world_size > 1:
            dist.broadcast_object_list(values, src=0)
        return values[0]


def find_ranks(layout: ParamLayout, device: torch.device) -> Ranks:
    """Agree with the other ranks on who counts which tensor; all ranks must call this."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        owned = torch.ones(len(layout.names), dtype=torch.int32, device=device)
        return Ranks(0, 1, owned, None, (False,) * len(layout.names))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    named = dict(zip(layout.names, layout.params, strict=True))
    signatures = {name: _replica_signature(p, world_size) for name, p in named.items()}
    gathered: list[dict[str, str] | None] = [None] * world_size
    dist.all_gather_object(gathered, signatures)
    by_rank = [g or {} for g in gathered]
    replicated = tuple(
        bool(signature) and all(known.get(name) == signature for known in by_rank)
        for name, signature in signatures.items()
    )
    counted: list[int] = []
    for name, p in zip(layout.names, layout.params, strict=True):
        owner = next(r for r, names in enumerate(by_rank) if name in names)
        counted.append(int(owns_elements(p)) if isinstance(p, DTensor) else int(owner == rank))
    owned = torch.tensor(counted, dtype=torch.int32, device=device)
    if not layout.sharded:
        return Ranks(rank, world_size, owned, None, replicated)
    if any(list(names) != list(by_rank[0]) for names in by_rank):
        raise ValueError(
            "attach: the ranks hold different sets of sharded parameters (a pipeline of sharded stages), which is not "
            "supported yet. Shard without a pipeline, or use policy='observe' on one rank of each stage."
        )
    numels = [to_local(p).numel() * c for p, c in zip(layout.params, counted, strict=True)]
    parts = _gather(torch.tensor(numels, dtype=torch.float64, device=device), world_size)
    return Ranks(rank, world_size, owned, parts, replicated)


def _replica_signature(param: Tensor, world_size: int) -> str:
    """Shape and dtype of a tensor that is whole on this rank and can be compared; empty when it is not."""
    if not (param.is_floating_point() or param.is_complex()):
        return ""
    if isinstance(param, DTensor):
        if param.device_mesh.size() != world_size or not all(p.is_replicate() for p in param.placements):
            return ""
    elif type(param.detach()) is not Tensor or param.layout is not torch.strided:
        return ""
    return f"{tuple(param.shape)} {param.dtype}"


def _gather(packet: Tensor, world_size: int) -> Tensor:
    source = packet.device
    if source.type == "cpu" and dist.get_backend() == "nccl":  # weights on the host, ranks joined by NCCL
        packet = packet.cuda()
    gathered = torch.empty(world_size * packet.numel(), dtype=packet.dtype, device=packet.device)
    _all_gather(gathered, packet)
    return gathered.view(world_size, packet.numel()).to(source)


def merge_parts(stats: Tensor, parts: Tensor) -> Tensor:
    """One row of statistics a tensor, from one row a rank and tensor; each element counts once."""
    stats = stats.to(parts.dtype)
    norm, mean, std, absmax, zeros, nonfinite, tiny, sub = stats.unbind(-1)
    counted = parts > 0
    numel = parts.sum(0).clamp(min=1)
    finite = (parts - nonfinite.clamp(min=0)).clamp(min=0)
    count = finite.sum(0)
    total_mean = (finite * mean).sum(0) / count.clamp(min=1)
    m2 = (std.square() * (finite - 1).clamp(min=0) + finite * (mean - total_mean).square()).sum(0)
    absent = (nonfinite < 0).all(0)
    total_nonfinite = nonfinite.clamp(min=0).where(counted, 0.0).sum(0)
    rows = (
        norm.square().where(counted, 0.0).sum(0).sqrt(),
        total_mean,
        (m2 / (count - 1).clamp(min=1)).sqrt(),
        absmax.amax(0),
        (zeros * parts).sum(0) / numel,
        total_nonfinite.where(~absent, -1.0),
        (tiny * parts).sum(0) / numel,
        (sub * parts).sum(0) / numel,
    )
    return torch.stack(rows, dim=-1).to(torch.float32)


class SharedValues:
    """The host-side numbers and checksums that this rank sends to the others, see `SharedSlot`."""

    def __init__(self, optimizers: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_values = settings_index(optimizers)
        self.values = torch.full((self.num_values + NUM_CHECKSUMS,), torch.nan, dtype=dtype, device=device)
        """This rank's numbers, then its checksums."""
        self._pinned = device.type == "cuda"

    @property
    def grad_checksums(self) -> Tensor:
        """Of the gradients after backward, and of those handed to the optimizer."""
        return self.values[self.num_values : self.num_values + 2]

    @property
    def replica_checksum(self) -> Tensor:
        """Checksum and norm of the replicated weights."""
        return self.values[self.num_values + 2 :]

    def write(self, numbers: Sequence[float | Tensor]) -> None:
        """Write the numbers without a wait: those of the host go in one copy, from new pinned memory each time."""
        plain = [float("nan") if isinstance(n, Tensor) else n for n in numbers]
        staged = torch.tensor(plain, dtype=self.values.dtype, pin_memory=self._pinned)
        self.values[: self.num_values].copy_(staged, non_blocking=True)
        for index, number in enumerate(numbers):
            if isinstance(number, Tensor):
                self.values[index] = number.detach().to(self.values.device, non_blocking=True)


class ReplicaChecksum:
    """Checksum of the bits of all replicated parameters, in integers: exact in any order, and without a wait."""

    def __init__(self, params: Sequence[Tensor], replicated: Sequence[bool], device: torch.device) -> None:
        self._params = [p for p, same in zip(params, replicated, strict=True) if same]
        self._device = device
        count = torch.arange(len(self._params) * _COLUMNS, dtype=torch.int64, device=device)
        self._factors = ((2 * count + 1) * _HASH_FACTOR).view(-1, _COLUMNS)
        """A different odd factor for each column sum, so that values that swap places change the checksum."""

    @property
    def enabled(self) -> bool:
        """Whether there are replicated parameters to compare."""
        return bool(self._params)

    @torch.no_grad()
    def measure(self, out: Tensor) -> None:
        """Write checksum and norm of the parameters as they are now to `out[0]` and `out[1]`."""
        parts = [to_local(p.detach()) for p in self._params]
        sums = torch.stack([_column_sums(t).to(self._device, non_blocking=True) for t in parts])
        out[0] = _exact_float((sums * self._factors).sum(), out.dtype)
        norms = [n.to(self._device, torch.float32, non_blocking=True) for n in torch._foreach_norm(parts)]
        out[1] = torch.linalg.vector_norm(torch.stack(norms))


def checksum(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Checksum of the bits of one small tensor, as a float that represents it exactly."""
    return _exact_float(_words(values).sum(dtype=torch.int64), dtype)


def _exact_float(number: Tensor, dtype: torch.dtype) -> Tensor:
    """As many of the low bits as a float of this type represents exactly."""
    return (number & ((1 << 52) - 1 if dtype is torch.float64 else (1 << 23) - 1)).to(dtype)


def _column_sums(tensor: Tensor) -> Tensor:
    """The words of each column summed modulo 2^32."""
    words = _words(tensor)
    whole = words.numel() - words.numel() % _COLUMNS
    sums = words[:whole].view(-1, _COLUMNS).sum(0, dtype=torch.int32)
    if whole < words.numel():
        sums[: words.numel() - whole] += words[whole:]
    return sums


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor as 32-bit words; one 16-bit or 8-bit element a word when they do not fill 32-bit words."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    size = flat.element_size()
    if flat.storage_offset() * size % 4:
        flat = flat.clone()
    if flat.numel() * size % 4:
        return flat.view(torch.int16 if size == 2 else torch.int8).to(torch.int32)
    return flat.view(torch.int32)
