"""A copy of a run taken apart into what files can hold: named tensors and plain JSON."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from surefoot.state.capture import Frozen
from surefoot.state.copies import Copy
from surefoot.state.disk.names import Names
from surefoot.state.disk.plain import Plain
from surefoot.state.disk.shards import DTYPES, Shard
from surefoot.state.tree import Slot

SCHEMA = 1


@dataclass(slots=True)
class Pieces:
    """What one process writes."""

    shards: dict[str, Shard] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)
    """Everything that is no tensor, of this process."""
    left_out: list[str] = field(default_factory=list)
    """What neither a tensor nor JSON can hold."""


def take_apart(copy: Copy, names: Names, *, rank: int = 0, world_size: int = 1) -> Pieces:
    """The pieces of a copy that this process has to write."""
    return _Apart(copy, names, rank, world_size).pieces()


class _Apart:
    def __init__(self, copy: Copy, names: Names, rank: int, world_size: int) -> None:
        self._copy = copy
        self._kept: Frozen = copy.frozen
        self._names = names
        self._rank = rank
        self._world_size = world_size
        self._named: dict[int, str] = {}
        """Names that slots have got."""
        self._found = Pieces()
        self._plain = Plain(self._put_own, lambda value: isinstance(value, Slot))

    def pieces(self) -> Pieces:
        self._modules()
        kept = self._kept
        self._found.told = {
            "schema": SCHEMA,
            "rank": self._rank,
            "world_size": self._world_size,
            "aliases": self._names.aliases,
            "optimizers": [self._optimizer(k) for k in range(len(kept.states))],
            "schedulers": [
                self._plain.told(s, f"rank{self._rank}.scheduler{i}") for i, s in enumerate(kept.schedulers)
            ],
            "scaler": self._plain.told(_without_found(kept.scaler), f"rank{self._rank}.scaler"),
            "extra": {name: self._plain.told(s, f"rank{self._rank}.extra.{name}") for name, s in kept.extra.items()},
            "chance": [
                self._plain.told(state, f"rank{self._rank}.chance.{i}") for i, (_, state) in enumerate(kept.chance)
            ],
        }
        self._found.left_out = self._plain.left_out
        return self._found

    def _modules(self) -> None:
        """Parameters and buffers under the names that the model gives them."""
        for place in self._kept.places:
            name = self._names.places.get((place.root, place.module, place.name))
            if name is not None and place.slot not in self._named:
                self._shared(name, place.slot)
        for p, slot in self._kept.loose:
            if slot not in self._named:
                self._shared(self._names.of[id(p)], slot)

    def _optimizer(self, k: int) -> dict[str, Any]:
        states: dict[str, Any] = {}
        plain = Plain(self._put_shared, lambda value: isinstance(value, Slot))
        for p, state in self._kept.states[k].items():
            name = self._names.of.get(id(p)) if isinstance(p, Tensor) else None
            if name is None:
                plain.left_out.append(f"optimizer {k}: state of {type(p).__name__}")
                continue
            states[name] = plain.told(state, f"optimizer{k}.{name}")
        groups = [
            plain.told(group, f"rank{self._rank}.optimizer{k}.group{g}") for g, group in enumerate(self._kept.groups[k])
        ]
        self._plain.left_out += plain.left_out
        return {"groups": groups, "state": states}

    # -- tensors

    def _put_own(self, path: str, slot: Slot) -> dict[str, Any] | None:
        """A tensor that is this process's own."""
        return self._put(path, slot, shared=False)

    def _put_shared(self, path: str, slot: Slot) -> dict[str, Any] | None:
        return self._put(path, slot, shared=not path.startswith("rank"))

    def _put(self, path: str, slot: Slot, *, shared: bool) -> dict[str, Any] | None:
        tensor = self._copy.tensors[slot]
        if slot not in self._named:
            if tensor.dtype not in DTYPES or tensor.layout is not torch.strided or tensor.is_meta:
                return None
            if shared:
                self._shared(path, slot)
            else:
                self._named[slot] = path
                self._found.shards[path] = Shard(tensor, (0,) * tensor.dim())
        on_host = self._copy.kinds[slot][3].type == "cpu"
        return {"$tensor": self._named[slot], "host": on_host}

    def _shared(self, name: str, slot: Slot) -> None:
        """A tensor that several processes hold, wholly or in parts: each part is written by one of them."""
        self._named[slot] = name
        tensor = self._copy.tensors[slot]
        spread = self._copy.spreads.get(slot)
        if spread is None:
            if zlib.crc32(name.encode()) % self._world_size == self._rank:
                self._found.shards[name] = Shard(tensor, (0,) * tensor.dim())
            return
        mesh, placements, shape, _ = spread
        if not tensor.numel() or not _first_of_its_kind(mesh, placements):
            return
        _, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
        self._found.shards[name] = Shard(tensor, tuple(offsets))


def _first_of_its_kind(mesh: Any, placements: Sequence[Any]) -> bool:
    """Whether, of the processes that hold the same part, this is the one to write it."""
    where = mesh.get_coordinate()
    return where is not None and all(
        at == 0 for at, placement in zip(where, placements, strict=True) if isinstance(placement, Replicate)
    )


def _without_found(scaler: Any) -> Any:
    """The scaler without what the step just done has found: a save is made between an update and the next step."""
    return {k: v for k, v in scaler.items() if k != "found"} if isinstance(scaler, Mapping) else scaler


def tensors_in(told: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The names of all tensors that a state refers to."""
    if isinstance(told, Mapping):
        if "$tensor" in told:
            yield str(told["$tensor"]), told
        yield from itertools.chain.from_iterable(tensors_in(value) for value in told.values())
    elif isinstance(told, list):
        yield from itertools.chain.from_iterable(tensors_in(value) for value in told)
