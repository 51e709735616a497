"""Splits a copy of a run into what files can hold: named tensors and JSON."""

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

from surefoot.checkpoint.copies import StateCopy
from surefoot.checkpoint.format.json_state import JsonEncoder
from surefoot.checkpoint.format.param_names import OptimizerParams, StateNames
from surefoot.checkpoint.format.rank_files import SCHEMA, first_names, rank_tensor_name, unused_name
from surefoot.checkpoint.format.shards import Shard, can_hold
from surefoot.checkpoint.store import SaveFailed
from surefoot.checkpoint.train_state import NonTensorState
from surefoot.checkpoint.tree import TensorSlot

SPLIT_BYTES = 1 << 20
"""Size from which every rank writes a part of a replicated tensor."""


@dataclass(slots=True)
class RankPieces:
    """What one rank writes."""

    shards: dict[str, Shard] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    """Everything of this rank that is not a tensor, as JSON."""
    left_out: list[str] = field(default_factory=list)
    """What neither a tensor nor JSON can hold."""
    weights: set[str] = field(default_factory=set)
    """Names of the shards of parameters."""
    slots: dict[str, int] = field(default_factory=dict)
    """Slots in the copy by name in the files, including tensors that other ranks write."""
    model_slots: dict[str, int] = field(default_factory=dict)
    """Slots of the parameters and buffers, by the model's names."""


def split_state(copy: StateCopy, names: StateNames, *, rank: int = 0, world_size: int = 1) -> RankPieces:
    """Split a copy into the pieces that this rank writes."""
    splitter = _StateSplitter(copy, names, rank, world_size)
    state = splitter.build()
    return RankPieces(
        shards=splitter.shards,
        state=state,
        left_out=splitter.left_out,
        weights=splitter.weights & splitter.shards.keys(),
        slots={name: slot for slot, name in splitter.names_of_slots.items()},
        model_slots=splitter.model_slots,
    )


def add_replay_batch(pieces: RankPieces, batch: Mapping[str, Any], rank: int) -> None:
    """Add a batch with the loss it has in this state, which each rank has its own of."""

    def put(path: str, tensor: Tensor) -> dict[str, Any] | None:
        if not can_hold(tensor):
            return None
        name = unused_name(rank_tensor_name(path, rank), pieces.shards)
        pieces.shards[name] = Shard(tensor, (0,) * tensor.dim(), tuple(tensor.shape))
        return {"$tensor": name, "host": tensor.device.type == "cpu"}

    encoder = JsonEncoder(put, Tensor)
    encoded = encoder.encode(dict(batch), "probe")
    if not encoder.left_out:
        pieces.state["probe"] = encoded
    pieces.left_out += encoder.left_out


def nonfinite_params(pieces: RankPieces) -> list[str]:
    """Names of parameters that contain a NaN or an infinity, with one synchronisation per device and dtype.

    Only the largest value of each is computed: a mask of all values would need memory that a device may not have.
    """
    groups: dict[Any, list[tuple[str, Tensor]]] = defaultdict(list)
    for name in sorted(pieces.weights):
        values = _comparable(pieces.shards[name].tensor)
        if values.numel() and values.is_floating_point():
            groups[values.device, values.dtype].append((name, values))
    names: list[str] = []
    for group in groups.values():
        largest = torch.stack(torch._foreach_norm([values for _, values in group], math.inf)).tolist()
        names += [name for (name, _), size in zip(group, largest, strict=True) if not math.isfinite(size)]
    return sorted(names)


def _comparable(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    small = tensor.dtype.itemsize == 1 and tensor.is_floating_point()  # not all of these support norms
    return tensor.to(torch.bfloat16) if small else tensor


class _StateSplitter:
    """Walks through a copy once. Who writes a tensor is decided without communication: of a sharded tensor, each rank
    writes its shard; of a replicated one, each a part; and every rank writes the tensors that it has its own of."""

    def __init__(self, copy: StateCopy, names: StateNames, rank: int, world_size: int) -> None:
        self.shards: dict[str, Shard] = {}
        self.left_out: list[str] = []
        self.weights: set[str] = set()
        """Names of parameters in the files."""
        self._copy = copy
        self._non_tensor: NonTensorState = copy.rest
        self._names = names
        self._rank = rank
        self._world_size = world_size
        self.names_of_slots: dict[int, str] = {}
        self.model_slots: dict[str, int] = {}
        """Slots of parameters and buffers, by the model's names."""
        self._used_names: set[str] = set()
        self._rank_only: list[str] = []
        """Names of tensors that this rank has its own of."""

    def build(self) -> dict[str, Any]:
        """The JSON state of this rank; collects the shards on the way."""
        rest, names = self._non_tensor, self._names
        self._add_modules()
        return {
            "schema": SCHEMA,
            "rank": self._rank,
            "world_size": self._world_size,
            "tensors": sorted(self.model_slots),
            "passing": sorted(self.model_slots.keys() & names.non_persistent),
            "own": sorted(self._rank_only),
            "aliases": dict(names.aliases),
            "optimizers": [self._optimizer(k, params) for k, params in enumerate(names.optimizers)],
            "schedulers": [self._rank_state(s, f"scheduler{i}") for i, s in enumerate(rest.schedulers)],
            "scaler": self._rank_state(_without_found_inf(rest.scaler), "scaler"),
            "extra": {name: self._extra(state, f"extra.{name}") for name, state in rest.extra.items()},
            "chance": {
                name: self._rank_state(state, f"chance.{name}") for name, state in rng_by_name(rest.rng_states).items()
            },
        } | self._module_states()

    def _add_modules(self) -> None:
        """Add parameters and buffers under the model's names."""
        for place in self._non_tensor.places:
            name = self._names.places.get((place.root, place.module, place.name))
            path = ".".join((place.module, place.name)).lstrip(".")
            if name is None:
                self.left_out.append(f"{path} (created after the save began)")
            elif place.slot in self.names_of_slots:
                pass
            elif not can_hold(self._copy.tensors[place.slot]):
                self.left_out.append(f"{path} ({self._copy.tensors[place.slot].dtype} in an unsupported layout)")
            else:
                self.model_slots[name] = place.slot
                self._add_tensor(name, place.slot, replicated=name in self._names.replicated)
                if not place.buffer:
                    self.weights.add(self.names_of_slots[place.slot])
        for p, slot in self._non_tensor.optimizer_only_params:
            name = self._names.by_id.get(id(p))
            if name is not None and slot not in self.names_of_slots and can_hold(self._copy.tensors[slot]):
                self.model_slots[name] = slot
                self._add_tensor(name, slot, replicated=name in self._names.replicated)
                self.weights.add(self.names_of_slots[slot])

    def _optimizer(self, k: int, params: OptimizerParams) -> dict[str, Any]:
        states: dict[str, Any] = {}
        param_device: Any = None
        replicated = False

        def put(path: str, slot: TensorSlot) -> dict[str, Any] | None:
            reference = self._reference(path, slot, replicated=replicated, single_owner=params.single_owner)
            return reference and reference | {"apart": self._copy.layouts[slot][3] != param_device}

        encoder = JsonEncoder(put, TensorSlot)
        for p, state in self._non_tensor.optimizer_states[params.index].items():
            name = self._names.by_id.get(id(p)) if isinstance(p, Tensor) else None
            if name is None:
                self.left_out.append(f"optimizer {k}: state of {type(p).__name__}")
                continue
            param_device = None if name not in self.model_slots else self._copy.layouts[self.model_slots[name]][3]
            replicated = name in self._names.replicated
            states[name] = encoder.encode(state, f"optimizer{k}.{name}")
        self.left_out += encoder.left_out
        options = self._non_tensor.param_groups[k]  # the optimizers that the user passed come first
        groups: list[dict[str, Any]] = [{"params": names} for names in params.groups]
        for g, (group, values) in enumerate(zip(groups, options, strict=False)):
            group["options"] = self._rank_state(values, f"optimizer{k}.group{g}")
        return {"class": params.cls, "groups": groups, "state": states}

    def _module_states(self) -> dict[str, Any]:
        """Extra states of modules, if there are any."""
        names = self._names.modules
        states = {names[key]: state for key, state in self._non_tensor.module_extra_states.items() if key in names}
        encoded = {name: self._rank_state(state, f"{name}._extra_state") for name, state in states.items()}
        return {"modules": encoded} if encoded else {}

    def _extra(self, state: Any, path: str) -> Any:
        """The state of an item in `extra`: this rank's own, unless it is replicated."""
        replicated = path in self._names.replicated_extra
        return self._encode(lambda part, slot: self._reference(part, slot, replicated=replicated), state, path)

    def _rank_state(self, state: Any, path: str) -> Any:
        """State that each rank has its own of."""
        return self._encode(self._reference, state, path)

    def _encode(self, put: Any, state: Any, path: str) -> Any:
        encoder = JsonEncoder(put, TensorSlot)
        encoded = encoder.encode(state, path)
        self.left_out += encoder.left_out
        return encoded

    # -- tensors

    def _reference(
        self, path: str, slot: TensorSlot, *, replicated: bool = False, single_owner: bool = False
    ) -> dict[str, Any] | None:
        """What stands for a tensor in JSON; None if it cannot be saved."""
        if slot not in self.names_of_slots:
            if not can_hold(self._copy.tensors[slot]):
                return None
            self._add_tensor(path, slot, replicated=replicated, single_owner=single_owner)
        return {"$tensor": self.names_of_slots[slot], "host": self._copy.layouts[slot][3].type == "cpu"}

    def _add_tensor(self, name: str, slot: TensorSlot, *, replicated: bool = False, single_owner: bool = False) -> None:
        """Name a tensor, and add the shard of it that this rank writes, if any."""
        tensor, sharding = self._copy.tensors[slot], self._copy.shardings.get(slot)
        rank_only = sharding is None and not replicated and not single_owner
        if rank_only:
            self._rank_only.append(name)
            name = rank_tensor_name(name, self._rank)
        name = unused_name(name, self._used_names)
        self._used_names.add(name)
        self.names_of_slots[slot] = name
        shard = Shard(tensor, (0,) * tensor.dim(), tuple(tensor.shape))
        if sharding is not None:
            shard = _local_shard(tensor, sharding)
        elif replicated and not single_owner:
            shard = self._replicated_part(name, tensor)
        if shard is not None:
            self.shards[name] = shard

    def _replicated_part(self, name: str, tensor: Tensor) -> Shard | None:
        """This rank's part of a replicated tensor: some rows of a large one; small ones are written in turn."""
        rank, world_size, shape = self._rank, self._world_size, tuple(tensor.shape)
        rows = shape[0] if shape else 0
        if rows >= world_size and tensor.numel() * tensor.element_size() >= SPLIT_BYTES:
            begin, end = rows * rank // world_size, rows * (rank + 1) // world_size
            return Shard(tensor[begin:end], (begin,) + (0,) * (len(shape) - 1), shape)
        turn = zlib.crc32(name.encode()) % world_size
        return Shard(tensor, (0,) * len(shape), shape) if turn == rank else None


def rng_by_name(states: Sequence[tuple[Any, Any]]) -> dict[str, Any]:
    """RNG states by generator; devices in the order of their indices."""
    host = dict(zip(("python", "numpy", "torch"), (state for _, state in states[:3]), strict=True))
    devices = sorted(states[3:], key=lambda item: item[0].__self__.device.index)
    return host | {f"device{i}": state for i, (_, state) in enumerate(devices)}


def _local_shard(tensor: Tensor, sharding: tuple[Any, ...]) -> Shard | None:
    """The shard of a sharded tensor; of the ranks that hold the same one, only the first writes it."""
    mesh, placements, shape, _ = sharding
    coordinate = mesh.get_coordinate()
    first = coordinate is not None and all(
        at == 0 for at, placement in zip(coordinate, placements, strict=True) if isinstance(placement, Replicate)
    )
    empty = not tensor.numel() and (tuple(tensor.shape) != tuple(shape) or any(coordinate or ()))
    if not first or empty:
        return None
    _, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    return Shard(tensor, tuple(offsets), tuple(shape))


def _without_found_inf(scaler: Any) -> Any:
    """The scaler without the infs that the last step found: a save is made between an update and the next step."""
    return {k: v for k, v in scaler.items() if k != "found"} if isinstance(scaler, Mapping) else scaler


def require_complete(pieces: RankPieces) -> None:
    """Check that everything the state refers to is written; with one rank, no file has to be read for that."""
    parts = {name for name, shard in pieces.shards.items() if tuple(shard.tensor.shape) != shard.shape}
    missing = parts | (pieces.slots.keys() - pieces.shards.keys())
    if missing:
        raise SaveFailed(
            f"only this rank saves, but {first_names(sorted(missing))} is sharded over several ranks; call"
            " surefoot.attach(..., resume=True) on every rank to save all parts"
        )


def require_finite(pieces: RankPieces) -> None:
    """Non-finite weights must never replace good ones."""
    names = nonfinite_params(pieces)
    if names:
        raise SaveFailed(f"non-finite values, which must not replace good ones, in {first_names(names)}")
