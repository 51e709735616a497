"""One number for all that a process holds of a run: the same before a save and after the way back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import xxhash

from surefoot.state.copies import Copy, Look
from surefoot.state.disk.names import Names
from surefoot.state.disk.pieces import Apart
from surefoot.state.disk.shards import can_hold
from surefoot.state.disk.stage import Stage
from surefoot.state.disk.told import root_of, tensors_in
from surefoot.state.tree import Slot


def hash_of(state: Copy | Look, names: Names) -> str:
    """xxh3-128 over names, types, shapes and bytes of all tensors, and everything else a checkpoint holds.

    Take it of a copy before it is written, and of `whole.look()` after `put_together`. Of what is spread over processes
    it covers this one's part. Neither who wraps the model nor which tensors share their memory makes a difference.
    """
    return hashes_of(state, names).whole


@dataclass(frozen=True, slots=True)
class Hashes:
    """Of a state, and of the parts of it that lie beside the model."""

    whole: str
    extra: dict[str, str]
    """Parameters of a model, or all of anything else; those without tensors are not worth it."""


def hashes_of(state: Copy | Look, names: Names) -> Hashes:
    """The same, and hashes of what is beside the model."""
    copy = state if isinstance(state, Copy) else _as_copy(state)
    hashed = _Hashed(copy, names, 0, 1)
    told = hashed.told() | {"tensors": hashed.modules, "passing": [], "own": [], "aliases": {}}
    models: dict[str, dict[str, str]] = {}
    for name, digest in hashed.modules.items():
        if name.startswith("extra.") and name not in names.buffers:
            models.setdefault(root_of(name), {})[name] = digest
    others = {f"extra.{name}": state for name, state in told["extra"].items() if any(True for _ in tensors_in(state))}
    return Hashes(_digest(told), {name: _digest(part) for name, part in {**models, **others}.items()})


def _digest(told: Any) -> str:
    return xxhash.xxh3_128(json.dumps(told, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _as_copy(look: Look) -> Copy:
    """What is there, without copying it."""
    copy = Copy()
    copy.tensors, copy.kinds, copy.spreads, copy.frozen = look.parts, look.kinds, look.spreads, look.frozen
    return copy


class _Hashed(Apart):
    """Walks as a save does, with a digest for every tensor."""

    def __init__(self, copy: Copy, names: Names, rank: int, world_size: int) -> None:
        super().__init__(copy, names, rank, world_size)
        self.modules: dict[str, str] = {}
        self._digests = _digests(copy)

    def _put(self, name: str, slot: Slot, *, alike: bool = False, sole: bool = False) -> None:
        self._named[slot] = name
        self.modules[name] = self._digests[slot]

    def _ref(self, path: str, slot: Slot, *, alike: bool = False, sole: bool = False) -> dict[str, Any] | None:
        return {"$tensor": self._digests[slot]} if slot in self._digests else None


def _digests(copy: Copy) -> dict[int, str]:
    """Of each tensor that files can hold, by its slot."""
    slots = [slot for slot, tensor in enumerate(copy.tensors) if can_hold(tensor)]
    slots.sort(key=lambda slot: (str(copy.kinds[slot][2]), str(copy.kinds[slot][3])))  # those that are alike together
    tensors = [copy.tensors[slot] for slot in slots]
    found = []
    for slot, tensor in zip(slots, tensors, strict=True):
        shape, spread = tuple(tensor.shape), copy.spreads.get(slot)
        whole = shape if spread is None else tuple(spread[2])
        found.append(xxhash.xxh3_128(f"{tensor.dtype} {shape} of {whole}".encode()))
    for part, contents in Stage().contents(tensors):
        begin = 0
        for i, size in contents:
            found[i].update(part[begin : begin + size])
            begin += size
    return {slot: digest.hexdigest() for slot, digest in zip(slots, found, strict=True)}
