"""Tensors to safetensors files, one a process, in the layout of torch.distributed.checkpoint, which can read them too.

They are written here and not by it, because it plans a save together, and a process that waits for another behind the
training's back is one that can hang; because it holds a second copy of everything in memory; and because here every
byte is hashed on its way.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
import xxhash
from torch import Tensor

from surefoot.state.disk.headers import CARRIED, FORMAT, NOTES, shard_file
from surefoot.state.pages import Pages

CHUNK = 1 << 25
"""Bytes that are on their way at a time."""
_NAMES = {getattr(torch, name): short for short, (name, _) in FORMAT.items()}
_CARRIED = {getattr(torch, name): (name, *how) for name, how in CARRIED.items() if hasattr(torch, name)}
Opener = Callable[[Path], BinaryIO]


@dataclass(frozen=True, slots=True)
class Shard:
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


def write_shards(folder: Path, rank: int, shards: Mapping[str, Shard], opener: Opener | None = None) -> Written:
    """Write this process's parts to its file, and flush it."""
    path = folder / shard_file(rank)
    order = sorted(shards, key=lambda name: (-shards[name].tensor.element_size(), name))
    stage = Stage()
    digest = xxhash.xxh3_128()
    size = 0
    with (opener or create)(path) as file:
        header = _header(order, shards)
        digest.update(header)
        size += file.write(header)
        for name in order:
            for part in stage.bytes_of(shards[name].tensor):
                digest.update(part)
                file.write(part)
                size += part.nbytes
        file.flush()
        os.fsync(file.fileno())
    return Written(path.name, size, digest.hexdigest())


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


_staged: list[Pages] = []
"""Pinned memory that no stage is using; it is asked for once and kept."""


def prepare_stage() -> None:
    """Have the pinned memory made that content of a device goes through."""
    _staged.append(Pages(CHUNK))


class Stage:
    """Gives out the content of tensors in pieces; from a device by way of pinned memory, on the current stream."""

    def __init__(self) -> None:
        self._pages: Pages | None = None

    def __del__(self) -> None:
        if self._pages is not None:
            _staged.append(self._pages)

    def bytes_of(self, tensor: Tensor) -> Iterator[memoryview]:
        if not tensor.numel():
            return
        if tensor.is_cuda:
            yield from self._from_device(tensor.detach())
            return
        flat = as_bytes(tensor.detach())
        for begin in range(0, flat.numel(), CHUNK):
            yield flat[begin : begin + CHUNK].numpy().data

    def _from_device(self, tensor: Tensor) -> Iterator[memoryview]:
        if self._pages is None:
            self._pages = _staged.pop() if _staged else Pages(CHUNK)
        pinned, stream = self._pages.memory, torch.cuda.current_stream(tensor.device)
        flat = as_bytes(tensor)
        for begin in range(0, flat.numel(), CHUNK):
            part = flat[begin : begin + CHUNK]
            pinned[: part.numel()].copy_(part, non_blocking=True)
            stream.synchronize()
            yield pinned[: part.numel()].numpy().data


def as_bytes(tensor: Tensor) -> Tensor:
    """The content as bytes in a row; of what does not lie so, a copy."""
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
