"""Tensors to safetensors files, one a process, in the layout of torch.distributed.checkpoint, which can read them too.

They are written here and not by it, because it plans a save together, and a process that waits for another behind the
training's back is one that can hang; because it holds a second copy of everything in memory; and because here every
byte is hashed on its way.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import xxhash
from torch import Tensor

from surefoot.checkpoint.format.safetensors_headers import CARRIED, FORMAT, NOTES, shard_file
from surefoot.checkpoint.format.staging import Stage, each_of

_NAMES = {getattr(torch, name): short for short, (name, _) in FORMAT.items()}
_CARRIED = {getattr(torch, name): (name, *how) for name, how in CARRIED.items() if hasattr(torch, name)}
Opener = Callable[[Path], BinaryIO]
Digest = xxhash.xxh3_128


class Shard(NamedTuple):
    """A part of a tensor, as this process holds it."""

    tensor: Tensor
    offsets: tuple[int, ...]
    """Where it begins within the whole."""
    shape: tuple[int, ...]
    """Of the whole."""


@dataclass(frozen=True, slots=True)
class Written:
    """A file that was written."""

    name: str
    size: int
    digest: str
    """xxh3-128 of its content, in hexadecimal."""


def can_hold(tensor: Tensor) -> bool:
    """Whether a file can: no sparse, quantised or meta tensors."""
    known = tensor.dtype in _NAMES or tensor.dtype in _CARRIED
    return known and tensor.layout is torch.strided and not tensor.is_meta


def write_shards(
    folder: Path,
    rank: int,
    shards: Mapping[str, Shard],
    opener: Opener | None = None,
    beside: Mapping[str, Digest] | None = None,
) -> Written:
    """Write this process's parts to its file, and flush it; `beside` gets the bytes of those it names."""
    path = folder / shard_file(rank)
    order = sorted(shards, key=lambda name: _place(name, shards[name].tensor))
    digest = xxhash.xxh3_128()
    size = 0
    with (opener or create)(path) as file:
        header = _header(order, shards)
        digest.update(header)
        size += file.write(header)
        wanted = [None if beside is None else beside.get(name) for name in order]
        for part, contents in Stage().contents([shards[name].tensor for name in order]):
            digest.update(part)
            file.write(part)
            size += part.nbytes
            for i, bytes_of_it in each_of(part, contents):
                own = wanted[i]
                if own is not None:
                    own.update(bytes_of_it)
        file.flush()
        os.fsync(file.fileno())
    return Written(path.name, size, digest.hexdigest())


def _place(name: str, tensor: Tensor) -> tuple[Any, ...]:
    """Wide values first, so that all lie where they may; what is alike together, so that it goes together."""
    return -tensor.element_size(), str(tensor.dtype), str(tensor.device), name


def create(path: Path) -> BinaryIO:
    return path.open("xb")


def _header(order: Sequence[str], shards: Mapping[str, Shard]) -> bytes:
    where, notes, entries = {}, {}, {}
    end = 0
    for name in order:
        shard = shards[name]
        tensor = shard.tensor
        shape, offsets, note = list(tensor.shape), list(shard.offsets), {}
        if tuple(shape) != shard.shape:
            note["shape"] = list(shard.shape)
        if tensor.dtype in _CARRIED:
            note["dtype"], kind, count = _CARRIED[tensor.dtype]
            if count > 1:
                shape, offsets = [*shape, count], [*offsets, 0]
        else:
            kind = _NAMES[tensor.dtype]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
        where[name] = {"saved_offsets": offsets}
        if note:
            notes[name] = note
    about = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(where), NOTES: json.dumps(notes)}
    text = json.dumps({"__metadata__": about} | entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
