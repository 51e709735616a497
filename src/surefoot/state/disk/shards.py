"""Tensors to safetensors files, one a process, in the layout of torch.distributed.checkpoint, which reads them again.

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

CHUNK = 1 << 25
"""Bytes that are on their way at a time."""
DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""What the format can hold."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a tensor, as this process holds it."""

    tensor: Tensor
    offsets: tuple[int, ...]
    """Where it begins within the whole."""


@dataclass(frozen=True, slots=True)
class Written:
    """A file that was written."""

    name: str
    size: int
    digest: str
    """xxh3-128 of its content, in hexadecimal."""


def file_name(rank: int) -> str:
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


def write_shards(
    folder: Path, rank: int, shards: Mapping[str, Shard], opener: Callable[[Path], BinaryIO] | None = None
) -> Written:
    """Write this process's parts to its file, and flush it."""
    path = folder / file_name(rank)
    order = sorted(shards, key=lambda name: (-shards[name].tensor.element_size(), name))
    digest = xxhash.xxh3_128()
    size = 0
    with (opener or _create)(path) as file:
        header = _header(order, shards)
        digest.update(header)
        size += file.write(header)
        for name in order:
            for part in _bytes_of(shards[name].tensor):
                digest.update(part)
                file.write(part)
                size += part.nbytes
        file.flush()
        os.fsync(file.fileno())
    return Written(path.name, size, digest.hexdigest())


def _create(path: Path) -> BinaryIO:
    return path.open("xb")


def _header(order: Sequence[str], shards: Mapping[str, Shard]) -> bytes:
    where = {name: {"saved_offsets": list(shards[name].offsets)} for name in order}
    told: dict[str, object] = {
        "__metadata__": {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(where)}
    }
    end = 0
    for name in order:
        tensor = shards[name].tensor
        begin, end = end, end + tensor.numel() * tensor.element_size()
        told[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(told).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: Tensor) -> Iterator[memoryview]:
    """The content of a tensor in pieces; from a device by way of pinned memory, on a stream of its own."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if not flat.is_cuda:
        for begin in range(0, flat.numel(), CHUNK):
            yield flat[begin : begin + CHUNK].numpy().data
        return
    stream = torch.cuda.Stream(flat.device)
    stage = torch.empty(min(CHUNK, max(flat.numel(), 1)), dtype=torch.uint8, pin_memory=True)
    for begin in range(0, flat.numel(), CHUNK):
        part = flat[begin : begin + CHUNK]
        with torch.cuda.stream(stream):
            stage[: part.numel()].copy_(part, non_blocking=True)
        stream.synchronize()
        yield stage[: part.numel()].numpy().data
