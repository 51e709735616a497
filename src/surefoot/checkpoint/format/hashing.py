"""One hash of everything that a rank holds of a run, the same before a save and after loading; and writing with it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from surefoot.checkpoint.copies import LiveState, StateCopy
from surefoot.checkpoint.format.param_names import StateNames
from surefoot.checkpoint.format.pieces import RankPieces, split_state
from surefoot.checkpoint.format.rank_files import root_of, state_file, tensor_names_in
from surefoot.checkpoint.format.shards import (
    Digest,
    HostStaging,
    Opener,
    WrittenFile,
    create,
    split_chunk,
    write_shards,
)


def hash_state(state: StateCopy | LiveState, names: StateNames) -> str:
    """xxh3-128 over names, dtypes, shapes and bytes of all tensors, and everything else that a checkpoint holds.

    Call it with a copy before it is written, and with `TrainState.collect()` after `load_checkpoint`. Of sharded
    tensors it covers this rank's part. Wrappers of the model and shared memory of tensors make no difference.
    """
    copy = state if isinstance(state, StateCopy) else _without_copying(state)
    return StateHasher(copy, split_state(copy, names), names).state_hash()


class StateHasher:
    """Hashes a copy: tensors that are written anyway are hashed on the way; the others are read for it."""

    def __init__(self, copy: StateCopy, pieces: RankPieces, names: StateNames) -> None:
        self._copy = copy
        self._names = names
        self._state = dict(pieces.state)
        self._slots = pieces.slots
        self._model_slots = pieces.model_slots
        self._digests: dict[int, Digest] = {}
        """Digests of tensors that were read, or will be before anybody asks, by slot."""

    def digests_for(self, pieces: RankPieces) -> dict[str, Digest]:
        """Digests that must be updated with the bytes of these shards as they are written, by name."""
        tensors = self._copy.tensors
        written = {name: slot for name, slot in pieces.slots.items() if name in pieces.shards}
        complete = {name: slot for name, slot in written.items() if pieces.shards[name].tensor is tensors[slot]}
        return {name: self._begin(slot) for name, slot in complete.items() if slot not in self._digests}

    def state_hash(self) -> str:
        """The hash of everything."""
        digests = self._read({*self._model_slots.values(), *self._slots.values()})
        state: dict[str, Any] = _with_digests(self._state, {n: digests[slot] for n, slot in self._slots.items()})
        tensors = {name: digests[slot] for name, slot in self._model_slots.items()}
        as_one_rank = {"rank": 0, "world_size": 1, "tensors": tensors, "passing": [], "own": [], "aliases": {}}
        return _digest(state | as_one_rank)

    def extra_hashes(self) -> dict[str, str]:
        """Hashes of the items in `extra`: the parameters of a module, or all of anything else that has tensors."""
        modules: dict[str, dict[str, int]] = {}
        for name, slot in self._model_slots.items():
            if name.startswith("extra.") and name not in self._names.buffers:
                modules.setdefault(root_of(name), {})[name] = slot
        others = {f"extra.{name}": state for name, state in self._state["extra"].items()}
        names_in = {name: set(tensor_names_in(state)) for name, state in others.items()}
        names = set().union(*names_in.values())
        slots = {self._slots[n] for n in names} | {slot for params in modules.values() for slot in params.values()}
        digests = self._read(slots)
        by_name = {name: digests[self._slots[name]] for name in names}
        values = {name: {n: digests[slot] for n, slot in params.items()} for name, params in modules.items()}
        values |= {name: _with_digests(others[name], by_name) for name, inside in names_in.items() if inside}
        return {name: _digest(value) for name, value in values.items()}

    def _begin(self, slot: int) -> Digest:
        tensor, sharding = self._copy.tensors[slot], self._copy.shardings.get(slot)
        shape = tuple(tensor.shape)
        full_shape = shape if sharding is None else tuple(sharding[2])
        digest = self._digests[slot] = xxhash.xxh3_128(f"{tensor.dtype} {shape} of {full_shape}".encode())
        return digest

    def _read(self, wanted: set[int]) -> dict[int, str]:
        """Digests by slot; tensors that were not read yet are read now."""
        slots = sorted(wanted - self._digests.keys())
        layouts = self._copy.layouts
        slots.sort(key=lambda slot: (str(layouts[slot][2]), str(layouts[slot][3])))  # batches tensors of a kind
        digests = [self._begin(slot) for slot in slots]
        for chunk, contents in HostStaging().contents([self._copy.tensors[slot] for slot in slots]):
            for i, part in split_chunk(chunk, contents):
                digests[i].update(part)
        return {slot: self._digests[slot].hexdigest() for slot in wanted}


def write_pieces(
    folder: Path, pieces: RankPieces, *, rank: int = 0, opener: Opener | None = None, hasher: StateHasher | None = None
) -> list[WrittenFile]:
    """Write and fsync the files of this rank; with a hasher, the state's hash is computed on the way and saved."""
    digests = None if hasher is None else hasher.digests_for(pieces)
    shards = write_shards(folder, rank, pieces.shards, opener, digests)
    if hasher is not None:
        pieces.state["hash"] = hasher.state_hash()
    text = json.dumps(pieces.state, allow_nan=False).encode()
    path = folder / state_file(rank)
    with (opener or create)(path) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return [shards, WrittenFile(path.name, len(text), xxhash.xxh3_128(text).hexdigest())]


def _with_digests(state: Any, digests: Mapping[str, str]) -> Any:
    """The state with digests in place of tensor names."""
    if type(state) is dict:
        if "$tensor" not in state:
            return {key: _with_digests(value, digests) for key, value in state.items()}
        digest = {"$tensor": digests[state["$tensor"]]}
        return digest | {"apart": state["apart"]} if "apart" in state else digest
    return [_with_digests(value, digests) for value in state] if type(state) is list else state


def _digest(state: Any) -> str:
    return xxhash.xxh3_128(json.dumps(state, sort_keys=True, allow_nan=False).encode()).hexdigest()


def _without_copying(live: LiveState) -> StateCopy:
    """The live tensors as a StateCopy."""
    copy = StateCopy()
    copy.tensors, copy.layouts, copy.shardings, copy.rest = live.local_tensors, live.layouts, live.shardings, live.rest
    return copy
