"""A copy of a run taken apart into what files can hold: named tensors and plain JSON."""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from surefoot.checkpoint.copies import Copy
from surefoot.checkpoint.format.json_state import Plain
from surefoot.checkpoint.format.param_names import Held, Names, free
from surefoot.checkpoint.format.shards import Shard, can_hold
from surefoot.checkpoint.format.state_files import SCHEMA, own_name
from surefoot.checkpoint.train_state import Frozen
from surefoot.checkpoint.tree import Slot

LARGE = 1 << 20
"""Bytes of a tensor that is the same everywhere, above which every process writes a part of it."""


@dataclass(slots=True)
class Pieces:
    """What one process writes."""

    shards: dict[str, Shard] = field(default_factory=dict)
    told: dict[str, Any] = field(default_factory=dict)
    """Everything that is no tensor, of this process."""
    left_out: list[str] = field(default_factory=list)
    """What neither a tensor nor JSON can hold."""
    weights: set[str] = field(default_factory=set)
    """Which of the shards are of parameters."""
    slots: dict[str, int] = field(default_factory=dict)
    """Where the copy holds what has these names in the files, also what others write."""
    held: dict[str, int] = field(default_factory=dict)
    """The same for what the model calls its own, by its names for it."""


def take_apart(copy: Copy, names: Names, *, rank: int = 0, world_size: int = 1) -> Pieces:
    """The pieces of a copy that this process has to write."""
    apart = _Apart(copy, names, rank, world_size)
    told = apart.told()
    slots = {name: slot for slot, name in apart.named.items()}
    return Pieces(apart.shards, told, apart.left_out, apart.weights & apart.shards.keys(), slots, apart.held)


def add_probe(pieces: Pieces, probe: Mapping[str, Any], rank: int) -> None:
    """A batch with the loss it has in this state, which is this process's own."""

    def put(path: str, tensor: Tensor) -> dict[str, Any] | None:
        if not can_hold(tensor):
            return None
        name = free(own_name(path, rank), pieces.shards)
        pieces.shards[name] = Shard(tensor, (0,) * tensor.dim(), tuple(tensor.shape))
        return {"$tensor": name, "host": tensor.device.type == "cpu"}

    plain = Plain(put, Tensor)
    told = plain.told(dict(probe), "probe")
    if not plain.left_out:
        pieces.told["probe"] = told
    pieces.left_out += plain.left_out


def not_finite(pieces: Pieces) -> list[str]:
    """The names of parameters that hold a NaN or an infinity, with one wait for each device and type.

    The largest value of each is asked for: a mark for every value would need memory that a device may not have.
    """
    alike: dict[Any, list[tuple[str, Tensor]]] = defaultdict(list)
    for name in sorted(pieces.weights):
        values = _comparable(pieces.shards[name].tensor)
        if values.numel() and values.is_floating_point():
            alike[values.device, values.dtype].append((name, values))
    found: list[str] = []
    for mine in alike.values():
        largest = torch.stack(torch._foreach_norm([values for _, values in mine], math.inf)).tolist()
        found += [name for (name, _), size in zip(mine, largest, strict=True) if not math.isfinite(size)]
    return sorted(found)


def _comparable(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    small = tensor.dtype.itemsize == 1 and tensor.is_floating_point()  # not all of these can be asked themselves
    return tensor.to(torch.bfloat16) if small else tensor


class _Apart:
    """Walks through a copy once. Who writes a tensor is known without asking: all who spread it, each its part; all
    who have it alike, each a part; and whoever has one of his own."""

    def __init__(self, copy: Copy, names: Names, rank: int, world_size: int) -> None:
        self.shards: dict[str, Shard] = {}
        self.left_out: list[str] = []
        self.weights: set[str] = set()
        """Names in the files of what are parameters."""
        self._copy = copy
        self._kept: Frozen = copy.frozen
        self._names = names
        self._rank = rank
        self._world_size = world_size
        self.named: dict[int, str] = {}
        """Names that slots have got."""
        self.held: dict[str, int] = {}
        """Slots of what the model calls its own."""
        self._used: set[str] = set()
        self._own: list[str] = []
        """Names of which this process has its own tensor."""

    def told(self) -> dict[str, Any]:
        kept = self._kept
        self._modules()
        return {
            "schema": SCHEMA,
            "rank": self._rank,
            "world_size": self._world_size,
            "tensors": sorted(self.held),
            "passing": sorted(self.held.keys() & self._names.passing),
            "own": sorted(self._own),
            "aliases": dict(self._names.aliases),
            "optimizers": [self._optimizer(k, one) for k, one in enumerate(self._names.optimizers)],
            "schedulers": [self._rest(s, f"scheduler{i}") for i, s in enumerate(kept.schedulers)],
            "scaler": self._rest(_without_found(kept.scaler), "scaler"),
            "extra": {name: self._beside(state, f"extra.{name}") for name, state in kept.extra.items()},
            "chance": {name: self._rest(state, f"chance.{name}") for name, state in chances(kept.chance).items()},
        } | self._made()

    def _modules(self) -> None:
        """Parameters and buffers under the names that the model gives them."""
        for place in self._kept.places:
            name = self._names.places.get((place.root, place.module, place.name))
            where = ".".join((place.module, place.name)).lstrip(".")
            if name is None:
                self.left_out.append(f"{where} (came after the save began)")
            elif place.slot in self.named:
                pass
            elif not can_hold(self._copy.tensors[place.slot]):
                self.left_out.append(f"{where} ({self._copy.tensors[place.slot].dtype} in a form that files lack)")
            else:
                self.held[name] = place.slot
                self._put(name, place.slot, alike=name in self._names.alike)
                if not place.buffer:
                    self.weights.add(self.named[place.slot])
        for p, slot in self._kept.loose:
            name = self._names.of.get(id(p))
            if name is not None and slot not in self.named and can_hold(self._copy.tensors[slot]):
                self.held[name] = slot
                self._put(name, slot, alike=name in self._names.alike)
                self.weights.add(self.named[slot])

    def _optimizer(self, k: int, held: Held) -> dict[str, Any]:
        states: dict[str, Any] = {}
        beside: Any = None
        alike = False

        def put(path: str, slot: Slot) -> dict[str, Any] | None:
            found = self._ref(path, slot, alike=alike, sole=held.sole)
            return found if found is None else found | {"apart": self._copy.kinds[slot][3] != beside}

        plain = Plain(put, Slot)
        for p, state in self._kept.states[held.number].items():
            name = self._names.of.get(id(p)) if isinstance(p, Tensor) else None
            if name is None:
                self.left_out.append(f"optimizer {k}: state of {type(p).__name__}")
                continue
            beside = None if name not in self.held else self._copy.kinds[self.held[name]][3]
            alike = name in self._names.alike
            states[name] = plain.told(state, f"optimizer{k}.{name}")
        self.left_out += plain.left_out
        options = self._kept.groups[k]  # those handed in come first
        groups: list[dict[str, Any]] = [{"params": names} for names in held.groups]
        for g, (group, values) in enumerate(zip(groups, options, strict=False)):
            group["options"] = self._rest(values, f"optimizer{k}.group{g}")
        return {"class": held.kind, "groups": groups, "state": states}

    def _made(self) -> dict[str, Any]:
        """States of modules' own making, if there are any."""
        names = self._names.modules
        made = {names[key]: state for key, state in self._kept.made.items() if key in names}
        told = {name: self._rest(state, f"{name}._extra_state") for name, state in made.items()}
        return {"modules": told} if told else {}

    def _beside(self, state: Any, path: str) -> Any:
        """What lies beside the model: this process's own, unless all have the same."""
        alike = path in self._names.shared
        return self._plain(lambda where, slot: self._ref(where, slot, alike=alike), state, path)

    def _rest(self, state: Any, path: str) -> Any:
        """What is this process's own."""
        return self._plain(self._ref, state, path)

    def _plain(self, put: Any, state: Any, path: str) -> Any:
        plain = Plain(put, Slot)
        told = plain.told(state, path)
        self.left_out += plain.left_out
        return told

    # -- tensors

    def _ref(self, path: str, slot: Slot, *, alike: bool = False, sole: bool = False) -> dict[str, Any] | None:
        """What stands in JSON where a tensor stood."""
        if slot not in self.named:
            if not can_hold(self._copy.tensors[slot]):
                return None
            self._put(path, slot, alike=alike, sole=sole)
        return {"$tensor": self.named[slot], "host": self._copy.kinds[slot][3].type == "cpu"}

    def _put(self, name: str, slot: Slot, *, alike: bool = False, sole: bool = False) -> None:
        """Give a tensor its name, and write it or a part of it, if it is this process's turn."""
        tensor, spread = self._copy.tensors[slot], self._copy.spreads.get(slot)
        mine = spread is None and not alike and not sole
        if mine:
            self._own.append(name)
            name = own_name(name, self._rank)
        name = free(name, self._used)
        self._used.add(name)
        self.named[slot] = name
        shard = Shard(tensor, (0,) * tensor.dim(), tuple(tensor.shape))
        if spread is not None:
            shard = _spread(tensor, spread)
        elif alike and not sole:
            shard = self._share(name, tensor)
        if shard is not None:
            self.shards[name] = shard

    def _share(self, name: str, tensor: Tensor) -> Shard | None:
        """This process's part of what all have: some rows of a large tensor, or a small one."""
        n, rank, world, shape = (
            tensor.shape[0] if tensor.dim() else 0,
            self._rank,
            self._world_size,
            tuple(tensor.shape),
        )
        if n >= world and tensor.numel() * tensor.element_size() >= LARGE:
            begin, end = n * rank // world, n * (rank + 1) // world
            return Shard(tensor[begin:end], (begin,) + (0,) * (len(shape) - 1), shape)
        turn = zlib.crc32(name.encode()) % world
        return Shard(tensor, (0,) * len(shape), shape) if turn == rank else None


def chances(states: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    """Random states by what they are of; devices by their order."""
    host = dict(zip(("python", "numpy", "torch"), (state for _, state in states[:3]), strict=True))
    device = sorted(states[3:], key=lambda one: one[0].__self__.device.index)
    return host | {f"device{i}": state for i, (_, state) in enumerate(device)}


def _spread(tensor: Tensor, spread: tuple[Any, ...]) -> Shard | None:
    """A part of a tensor that is spread over processes; of those who hold the same part, one writes it."""
    mesh, placements, shape, _ = spread
    where = mesh.get_coordinate()
    first = where is not None and all(
        at == 0 for at, placement in zip(where, placements, strict=True) if isinstance(placement, Replicate)
    )
    nothing = not tensor.numel() and (tuple(tensor.shape) != tuple(shape) or any(where or ()))
    if not first or nothing:
        return None
    _, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return Shard(tensor, tuple(offsets), tuple(shape))


def _without_found(scaler: Any) -> Any:
    """The scaler without what the step just done has found: a save is made between an update and the next step."""
    return {k: v for k, v in scaler.items() if k != "found"} if isinstance(scaler, Mapping) else scaler
