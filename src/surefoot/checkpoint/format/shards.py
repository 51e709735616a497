"""Writes tensors to safetensors files, one per rank, in a layout that torch.distributed.checkpoint can read.

They are not written by torch.distributed.checkpoint because its ranks plan a save together, and a background thread
that waits for another rank can hang; because it holds a second copy of everything in memory; and because here every
byte is hashed as it is written.

Tensor content goes to the host in a thread beside the training. Each torch call in that thread takes the GIL from the
training thread, which costs a host-bound run twice. So small tensors are batched: a few calls for hundreds of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import xxhash
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from surefoot.checkpoint.format.rank_files import CARRIED_AS, NOTES, shard_file
from surefoot.checkpoint.snapshot_memory import PinnedPages
from surefoot.journal.safetensors_header import DTYPES

CHUNK = 1 << 25
"""Bytes in transfer at a time."""
SMALL = CHUNK // 8
"""Bytes up to which a tensor is batched with others, which takes one more copy on a device."""
_BATCHED_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32})
"""Dtypes that are batched; others are rare."""
_FORMAT_NAMES = {getattr(torch, torch_name): name for name, (torch_name, _) in DTYPES.items()}
_CARRIED = {getattr(torch, name): (name, *how) for name, how in CARRIED_AS.items() if hasattr(torch, name)}
Opener = Callable[[Path], BinaryIO]
Digest = xxhash.xxh3_128
Contents = list[tuple[int, int]]
"""Index and number of bytes of each tensor in a chunk, in order."""

_free_pages: list[PinnedPages] = []
"""Pinned memory that is not in use; it is allocated once and kept."""


class Shard(NamedTuple):
    """A part of a tensor, as this rank holds it."""

    tensor: Tensor
    offsets: tuple[int, ...]
    """Where it begins in the full tensor."""
    shape: tuple[int, ...]
    """The shape of the full tensor."""


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file that was written."""

    name: str
    size: int
    digest: str
    """xxh3-128 of its content, in hexadecimal."""


def can_hold(tensor: Tensor) -> bool:
    """Whether a file can hold the tensor: it must not be sparse, quantised or on the meta device."""
    known = tensor.dtype in _FORMAT_NAMES or tensor.dtype in _CARRIED
    return known and tensor.layout is torch.strided and not tensor.is_meta


def write_shards(
    folder: Path,
    rank: int,
    shards: Mapping[str, Shard],
    opener: Opener | None = None,
    digests: Mapping[str, Digest] | None = None,
) -> WrittenFile:
    """Write this rank's shards to its file, and fsync it; `digests` are updated with the bytes of their tensors."""
    path = folder / shard_file(rank)
    order = sorted(shards, key=lambda name: _sort_key(name, shards[name].tensor))
    file_digest = xxhash.xxh3_128()
    size = 0
    with (opener or create)(path) as file:
        header = _header(order, shards)
        file_digest.update(header)
        size += file.write(header)
        tensor_digests = [None if digests is None else digests.get(name) for name in order]
        for chunk, contents in HostStaging().contents([shards[name].tensor for name in order]):
            file_digest.update(chunk)
            file.write(chunk)
            size += chunk.nbytes
            for i, part in split_chunk(chunk, contents):
                digest = tensor_digests[i]
                if digest is not None:
                    digest.update(part)
        file.flush()
        os.fsync(file.fileno())
    return WrittenFile(path.name, size, file_digest.hexdigest())


def _sort_key(name: str, tensor: Tensor) -> tuple[Any, ...]:
    """Wide values first, so that all are aligned; tensors of a kind together, so that they are batched."""
    return -tensor.element_size(), str(tensor.dtype), str(tensor.device), name


def create(path: Path) -> BinaryIO:
    return path.open("xb")


def _header(order: Sequence[str], shards: Mapping[str, Shard]) -> bytes:
    sharding, notes, entries = {}, {}, {}
    end = 0
    for name in order:
        shard = shards[name]
        tensor = shard.tensor
        shape, offsets, note = list(tensor.shape), list(shard.offsets), {}
        if tuple(shape) != shard.shape:
            note["shape"] = list(shard.shape)
        if tensor.dtype in _CARRIED:
            note["dtype"], dtype, count = _CARRIED[tensor.dtype]
            if count > 1:
                shape, offsets = [*shape, count], [*offsets, 0]
        else:
            dtype = _FORMAT_NAMES[tensor.dtype]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        sharding[name] = {"saved_offsets": offsets}
        if note:
            notes[name] = note
    metadata = {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(sharding)}
    metadata[NOTES] = json.dumps(notes)
    text = json.dumps({"__metadata__": metadata} | entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# -- tensor content as bytes on the host


def preallocate_staging() -> None:
    """Allocate the pinned memory through which content of a device is copied."""
    _free_pages.append(PinnedPages(CHUNK))


class HostStaging:
    """Yields the content of tensors in chunks; from a device through pinned memory, on the current stream."""

    def __init__(self) -> None:
        self._pages: PinnedPages | None = None

    def __del__(self) -> None:
        if self._pages is not None:
            _free_pages.append(self._pages)

    def contents(self, tensors: Sequence[Tensor]) -> Iterator[tuple[memoryview, Contents]]:
        """The bytes of all tensors in order, and which tensor they belong to; a chunk is valid until the next."""
        for group in _groups(tensors):
            batch = [tensors[i] for i in group]
            flat = _flatten_dense_tensors(batch) if len(batch) > 1 else batch[0].detach()
            sizes = [(i, tensors[i].nbytes) for i in group]
            for chunk in self._chunks(flat):
                yield chunk, sizes if len(batch) > 1 else [(group[0], chunk.nbytes)]

    def _chunks(self, tensor: Tensor) -> Iterator[memoryview]:
        flat = as_bytes(tensor)
        if not flat.is_cuda:
            for begin in range(0, flat.numel(), CHUNK):
                yield flat[begin : begin + CHUNK].numpy().data
            return
        if self._pages is None:
            self._pages = _free_pages.pop() if _free_pages else PinnedPages(CHUNK)
        pinned, stream = self._pages.memory, torch.cuda.current_stream(tensor.device)
        for begin in range(0, flat.numel(), CHUNK):
            part = flat[begin : begin + CHUNK]
            host = pinned[: part.numel()]
            host.copy_(part, non_blocking=True)
            stream.synchronize()
            yield host.numpy().data


def split_chunk(chunk: memoryview, contents: Contents) -> Iterator[tuple[int, memoryview]]:
    """The part of a chunk that belongs to each tensor, by its index."""
    begin = 0
    for i, size in contents:
        yield i, chunk[begin : begin + size]
        begin += size


def _groups(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Indices of consecutive tensors that are batched."""
    group: list[int] = []
    group_kind, room = None, 0
    for i, tensor in enumerate(tensors):
        size = tensor.nbytes
        kind = (tensor.dtype, tensor.device) if size <= SMALL and _simple(tensor) else None
        if group and (kind is None or kind != group_kind or size > room):
            yield group
            group = []
        if not group:
            group_kind, room = kind, CHUNK
        group.append(i)
        room -= size
    if group:
        yield group


def _simple(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.dtype in _BATCHED_DTYPES and tensor.is_contiguous() and not tensor.is_neg()


def as_bytes(tensor: Tensor) -> Tensor:
    """The content as a flat byte tensor; a copy if it is not contiguous."""
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
