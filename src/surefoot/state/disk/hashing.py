"""One number for all that a process holds of a run: the same before a save and after the way back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xxhash

from surefoot.state.copies import Copy, Look
from surefoot.state.disk.names import Names
from surefoot.state.disk.pieces import Pieces, take_apart
from surefoot.state.disk.shards import can_hold
from surefoot.state.disk.stage import Stage
from surefoot.state.disk.told import root_of, tensors_in


def hash_of(state: Copy | Look, names: Names) -> str:
    """xxh3-128 over names, types, shapes and bytes of all tensors, and everything else a checkpoint holds.

    Take it of a copy before it is written, and of `whole.look()` after `put_together`. Of what is spread over processes
    it covers this one's part. Neither who wraps the model nor which tensors share their memory makes a difference.
    """
    copy = state if isinstance(state, Copy) else _as_copy(state)
    return hashes_of(copy, take_apart(copy, names), names).whole


@dataclass(frozen=True, slots=True)
class Hashes:
    """Of a state, and of the parts of it that lie beside the model."""

    whole: str
    extra: dict[str, str]
    """Parameters of a model, or all of anything else; those without tensors are not worth it."""


def hashes_of(copy: Copy, pieces: Pieces, names: Names) -> Hashes:
    """The same of a copy that was taken apart, and hashes of what is beside the model."""
    digests = _digests(copy)
    held = {name: digests[slot] for name, slot in pieces.held.items()}
    told: dict[str, Any] = _with_digests(pieces.told, {name: digests[slot] for name, slot in pieces.slots.items()})
    told |= {"rank": 0, "world_size": 1, "tensors": held, "passing": [], "own": [], "aliases": {}}
    models: dict[str, dict[str, str]] = {}
    for name, digest in held.items():
        if name.startswith("extra.") and name not in names.buffers:
            models.setdefault(root_of(name), {})[name] = digest
    others = {f"extra.{name}": state for name, state in told["extra"].items() if any(True for _ in tensors_in(state))}
    return Hashes(_digest(told), {name: _digest(part) for name, part in {**models, **others}.items()})


def _with_digests(told: Any, digests: Mapping[str, str]) -> Any:
    """What is told, with digests where names of tensors stood."""
    if type(told) is dict:
        if "$tensor" not in told:
            return {key: _with_digests(value, digests) for key, value in told.items()}
        digest = {"$tensor": digests[told["$tensor"]]}
        return digest | {"apart": told["apart"]} if "apart" in told else digest
    return [_with_digests(value, digests) for value in told] if type(told) is list else told


def _digest(told: Any) -> str:
    return xxhash.xxh3_128(json.dumps(told, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _as_copy(look: Look) -> Copy:
    """What is there, without copying it."""
    copy = Copy()
    copy.tensors, copy.kinds, copy.spreads, copy.frozen = look.parts, look.kinds, look.spreads, look.frozen
    return copy


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
