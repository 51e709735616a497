"""Reads tensors from the files: torch.distributed.checkpoint plans what to read, the bytes go straight into tensors."""

from __future__ import annotations

import io
import math
import os
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from surefoot.checkpoint.format.rank_files import CheckpointMismatch, TensorEntry, TensorPart
from surefoot.checkpoint.format.shards import CHUNK

NUM_READERS = 4
"""Reader threads: one alone copies from the page cache more slowly than a disk can read."""


def dtype_of(entry: TensorEntry) -> torch.dtype:
    return getattr(torch, entry.dtype)


@torch.no_grad()
def read_into(targets: Mapping[str, Tensor], entries: Mapping[str, TensorEntry]) -> None:
    """Fill tensors, or the parts of them that this rank holds."""
    metadata: dict[str, Any] = {name: _metadata(entries[name]) for name in targets}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), Metadata(metadata), is_coordinator=True)
    by_file: dict[Path, list[tuple[TensorPart, ReadItem]]] = defaultdict(list)
    for item in planner.create_local_plan().items:
        entry = entries[item.storage_index.fqn]
        part = next(p for p in entry.parts if p.offsets == tuple(item.storage_index.offset or ()))
        by_file[part.file].append((part, item))
    readers = _ThreadReaders()
    with ThreadPoolExecutor(NUM_READERS, "surefoot-read") as pool:
        for path, items in by_file.items():
            items.sort(key=lambda pair: pair[0].begin)
            with _open(path) as file:
                futures = [
                    pool.submit(readers.fill, planner.resolve_tensor(item).detach(), file, part, item)
                    for part, item in items
                ]
                for future in futures:
                    future.result()


def read_part(entry: TensorEntry, part: TensorPart) -> Tensor:
    """One block as it is stored in its file."""
    tensor = torch.empty(part.shape, dtype=dtype_of(entry))
    with _open(part.file) as file:
        _FileReader().read_bytes(_as_bytes(tensor), file, part.begin)
    return tensor


@contextmanager
def _open(path: Path) -> Iterator[io.FileIO]:
    try:
        with path.open("rb", buffering=0) as file:
            yield file
    except OSError as error:
        raise CheckpointMismatch(f"{path} cannot be read: {error}") from None


def _metadata(entry: TensorEntry) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.shape)) for p in entry.parts]
    return TensorStorageMetadata(TensorProperties(dtype_of(entry)), torch.Size(entry.shape), chunks)


class _ThreadReaders(threading.local):
    """One reader per thread."""

    def __init__(self) -> None:
        self._reader = _FileReader()

    @torch.no_grad()
    def fill(self, target: Tensor, file: io.FileIO, part: TensorPart, item: ReadItem) -> None:
        self._reader.fill(target, file, part, item)


class _FileReader:
    """Reads bytes of a file into tensors on any device, with memory for one part of a tensor at most."""

    def __init__(self) -> None:
        self._pinned: Tensor | None = None

    def fill(self, target: Tensor, file: io.FileIO, part: TensorPart, item: ReadItem) -> None:
        if not target.numel():
            return
        begin, lengths = tuple(item.storage_offsets), tuple(item.lengths)
        if not _is_contiguous_block(part.shape, begin, lengths):
            block = torch.empty(part.shape, dtype=target.dtype)
            self.read_bytes(_as_bytes(block), file, part.begin)
            for d, (at, n) in enumerate(zip(begin, lengths, strict=True)):
                block = block.narrow(d, at, n)
            target.copy_(block)
            return
        strides = [math.prod(part.shape[d + 1 :]) for d in range(len(part.shape))]
        first = part.begin + target.element_size() * sum(at * s for at, s in zip(begin, strides, strict=True))
        if target.is_contiguous() and (target.is_cuda or target.device.type == "cpu"):
            self.read_bytes(_as_bytes(target), file, first)
        else:
            block = torch.empty(target.shape, dtype=target.dtype)
            self.read_bytes(_as_bytes(block), file, first)
            target.copy_(block)

    def read_bytes(self, target: Tensor, file: io.FileIO, begin: int) -> None:
        """Fill a flat byte tensor."""
        if not target.is_cuda:
            for at in range(0, target.numel(), CHUNK):
                _read_exactly(file, begin + at, target[at : at + CHUNK])
            return
        if self._pinned is None:
            self._pinned = torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True)
        for at in range(0, target.numel(), CHUNK):
            chunk = target[at : at + CHUNK]
            _read_exactly(file, begin + at, self._pinned[: chunk.numel()])
            chunk.copy_(self._pinned[: chunk.numel()])


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _read_exactly(file: io.FileIO, begin: int, target: Tensor) -> None:
    """Fill the target from this position; threads may read one file concurrently."""
    view = target.numpy().data
    while view:
        count = os.preadv(file.fileno(), [view], begin)
        if not count:
            raise CheckpointMismatch(f"{file.name} ends too early")
        view, begin = view[count:], begin + count


def _is_contiguous_block(shape: Sequence[int], begin: Sequence[int], lengths: Sequence[int]) -> bool:
    """Whether a block within a block is stored without gaps."""
    cut = [d for d, n in enumerate(lengths) if n != 1]
    first = cut[0] if cut else len(shape)
    return all(lengths[d] == shape[d] and begin[d] == 0 for d in range(first + 1, len(shape)))
