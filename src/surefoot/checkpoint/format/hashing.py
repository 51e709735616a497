"""One number for all that a process holds of a run: the same before a save and after the way back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import xxhash

from surefoot.checkpoint.copies import Copy, Look
from surefoot.checkpoint.format.param_names import Names
from surefoot.checkpoint.format.pieces import Pieces, take_apart
from surefoot.checkpoint.format.shards import Digest
from surefoot.checkpoint.format.staging import Stage, each_of
from surefoot.checkpoint.format.state_files import root_of, tensors_in


def hash_of(state: Copy | Look, names: Names) -> str:
    """xxh3-128 over names, types, shapes and bytes of all tensors, and everything else a checkpoint holds.

    Take it of a copy before it is written, and of `whole.look()` after `put_together`. Of what is spread over processes
    it covers this one's part. Neither who wraps the model nor which tensors share their memory makes a difference.
    """
    copy = state if isinstance(state, Copy) else _as_copy(state)
    return Hashing(copy, take_apart(copy, names), names).whole()


class Hashing:
    """Of a copy that was taken apart: what is read anyway, to be written, is hashed on its way; the rest is read."""

    def __init__(self, copy: Copy, pieces: Pieces, names: Names) -> None:
        self._copy = copy
        self._names = names
        self._told = dict(pieces.told)
        self._slots = pieces.slots
        self._held = pieces.held
        self._digests: dict[int, Digest] = {}
        """Of tensors that were read, or will be before anybody asks, by their slots."""

    def beside(self, pieces: Pieces) -> dict[str, Digest]:
        """What the bytes of these shards, once each is read, have to be given to."""
        tensors = self._copy.tensors
        mine = {name: slot for name, slot in pieces.slots.items() if name in pieces.shards}
        whole = {name: slot for name, slot in mine.items() if pieces.shards[name].tensor is tensors[slot]}
        return {name: self._begin(slot) for name, slot in whole.items() if slot not in self._digests}

    def whole(self) -> str:
        """The hash of all."""
        digests = self._read({*self._held.values(), *self._slots.values()})
        told: dict[str, Any] = _with_digests(self._told, {n: digests[slot] for n, slot in self._slots.items()})
        held = {name: digests[slot] for name, slot in self._held.items()}
        alone = {"rank": 0, "world_size": 1, "tensors": held, "passing": [], "own": [], "aliases": {}}
        return _digest(told | alone)

    def extra(self) -> dict[str, str]:
        """Hashes of what lies beside the model: parameters of another, or all of anything else that has tensors."""
        models: dict[str, dict[str, int]] = {}
        for name, slot in self._held.items():
            if name.startswith("extra.") and name not in self._names.buffers:
                models.setdefault(root_of(name), {})[name] = slot
        others = {f"extra.{name}": state for name, state in self._told["extra"].items()}
        found = {name: set(tensors_in(state)) for name, state in others.items()}
        names = set().union(*found.values())
        digests = self._read({self._slots[n] for n in names} | {s for held in models.values() for s in held.values()})
        by_name = {name: digests[self._slots[name]] for name in names}
        told = {name: {n: digests[slot] for n, slot in held.items()} for name, held in models.items()}
        told |= {name: _with_digests(others[name], by_name) for name, inside in found.items() if inside}
        return {name: _digest(part) for name, part in told.items()}

    def _begin(self, slot: int) -> Digest:
        tensor, spread = self._copy.tensors[slot], self._copy.spreads.get(slot)
        shape = tuple(tensor.shape)
        whole = shape if spread is None else tuple(spread[2])
        begun = self._digests[slot] = xxhash.xxh3_128(f"{tensor.dtype} {shape} of {whole}".encode())
        return begun

    def _read(self, wanted: set[int]) -> dict[int, str]:
        """Digests of these, by slot; those that nobody has read are read now."""
        slots = sorted(wanted - self._digests.keys())
        slots.sort(key=lambda slot: (str(self._copy.kinds[slot][2]), str(self._copy.kinds[slot][3])))  # alike together
        begun = [self._begin(slot) for slot in slots]
        for part, contents in Stage().contents([self._copy.tensors[slot] for slot in slots]):
            for i, bytes_of_it in each_of(part, contents):
                begun[i].update(bytes_of_it)
        return {slot: self._digests[slot].hexdigest() for slot in wanted}


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
