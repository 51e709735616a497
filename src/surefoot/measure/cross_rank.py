"""More than one process: one small gather a step, after which every process holds the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from surefoot.measure.layout import Layout, counts_here, local

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Newer torch has renamed it."""
_NONE = -(1 << 62)


@dataclass(frozen=True, slots=True)
class Ranks:
    """How the processes' parts fit together."""

    rank: int
    world: int
    once: Tensor
    """For each tensor, 1 when this process's part is the one that counts."""
    parts: Tensor | None
    """Where tensors are sharded: for each process and tensor, how many elements of its part count."""
    replicated: tuple[bool, ...]
    """Which tensors are whole on every process, so that all of them should hold the same values."""

    def gather(self, packet: Tensor) -> Tensor:
        """The packets of all processes, one a row; the one collective of a step."""
        if self.world == 1:
            return packet[None]
        return _gather(packet, self.world)

    def shared(self, numbers: Sequence[int], most: int) -> list[int]:
        """Those of these numbers, `most` at the most, that every process has named; they all call it at once."""
        if self.world == 1:
            return list(numbers)
        padded = [*numbers, *[_NONE] * most][:most]
        told = _gather(torch.tensor(padded, dtype=torch.int64, device=self.once.device), self.world)
        return sorted(set.intersection(*(set(each) for each in told.tolist())) - {_NONE})

    def from_first(self, value: object) -> Any:
        """What the first process says, on all of them."""
        told = [value]
        if self.world > 1:
            dist.broadcast_object_list(told, src=0)
        return told[0]


def ranks_of(layout: Layout, device: torch.device) -> Ranks:
    """Agree with the other processes on who counts which tensor; called by all of them at once."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        once = torch.ones(len(layout.names), dtype=torch.int32, device=device)
        return Ranks(0, 1, once, None, (False,) * len(layout.names))
    rank, world = dist.get_rank(), dist.get_world_size()
    named = dict(zip(layout.names, layout.params, strict=True))
    mine = {name: _kind(p, world) for name, p in named.items()}
    told: list[dict[str, str] | None] = [None] * world
    dist.all_gather_object(told, mine)
    held = [t or {} for t in told]
    replicated = tuple(bool(kind) and all(h.get(name) == kind for h in held) for name, kind in mine.items())
    counted: list[int] = []
    for name, p in zip(layout.names, layout.params, strict=True):
        owner = next(r for r, names in enumerate(held) if name in names)
        counted.append(int(counts_here(p)) if isinstance(p, DTensor) else int(owner == rank))
    once = torch.tensor(counted, dtype=torch.int32, device=device)
    if not layout.sharded:
        return Ranks(rank, world, once, None, replicated)
    if any(list(names) != list(held[0]) for names in held):
        raise ValueError(
            "attach: the processes hold different sets of sharded parameters (a pipeline of sharded stages); this is "
            "not supported yet. Shard without a pipeline, or use policy='observe' in one process of each stage."
        )
    sizes = torch.tensor(
        [local(p).numel() * c for p, c in zip(layout.params, counted, strict=True)], dtype=torch.float64, device=device
    )
    return Ranks(rank, world, once, _gather(sizes, world), replicated)


def _kind(param: Tensor, world: int) -> str:
    """Shape and type of a tensor that is whole on this process and can be compared; empty when it is not."""
    if not (param.is_floating_point() or param.is_complex()):
        return ""
    if isinstance(param, DTensor):
        if param.device_mesh.size() != world or not all(p.is_replicate() for p in param.placements):
            return ""
    elif type(param.detach()) is not Tensor or param.layout is not torch.strided:
        return ""
    return f"{tuple(param.shape)} {param.dtype}"


def _gather(packet: Tensor, world: int) -> Tensor:
    home = packet.device
    if home.type == "cpu" and dist.get_backend() == "nccl":  # weights kept on the host, processes joined by NCCL
        packet = packet.cuda()
    gathered = torch.empty(world * packet.numel(), dtype=packet.dtype, device=packet.device)
    _all_gather(gathered, packet)
    return gathered.view(world, packet.numel()).to(home)


def merge_parts(stats: Tensor, parts: Tensor) -> Tensor:
    """One row a tensor from one row a process and tensor, each element counted once."""
    stats = stats.to(parts.dtype)
    norm, mean, std, largest, zeros, nonfinite, tiny, sub = stats.unbind(-1)
    held = parts > 0
    whole = parts.sum(0).clamp(min=1)
    finite = (parts - nonfinite.clamp(min=0)).clamp(min=0)
    count = finite.sum(0)
    middle = (finite * mean).sum(0) / count.clamp(min=1)
    m2 = (std.square() * (finite - 1).clamp(min=0) + finite * (mean - middle).square()).sum(0)
    absent = (nonfinite < 0).all(0)
    bad = nonfinite.clamp(min=0).where(held, 0.0).sum(0)
    rows = (
        norm.square().where(held, 0.0).sum(0).sqrt(),
        middle,
        (m2 / (count - 1).clamp(min=1)).sqrt(),
        largest.amax(0),
        (zeros * parts).sum(0) / whole,
        bad.where(~absent, -1.0),
        (tiny * parts).sum(0) / whole,
        (sub * parts).sum(0) / whole,
    )
    return torch.stack(rows, dim=-1).to(torch.float32)
