"""Tensors out of the files: torch.distributed.checkpoint plans what comes from where, the bytes go straight in."""

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

from surefoot.checkpoint.format.mismatch import DoesNotFit
from surefoot.checkpoint.format.safetensors_headers import Entry, Part
from surefoot.checkpoint.format.staging import CHUNK

READERS = 4
"""Threads that read: one alone copies what the system holds in memory more slowly than a disk can give."""


def dtype_of(entry: Entry) -> torch.dtype:
    return getattr(torch, entry.dtype)


@torch.no_grad()
def read_into(targets: Mapping[str, Tensor], entries: Mapping[str, Entry]) -> None:
    """Fill tensors, or the parts of them that this process holds."""
    told: dict[str, Any] = {name: _metadata(entries[name]) for name in targets}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(targets), Metadata(told), is_coordinator=True)
    by_file: dict[Path, list[tuple[Part, ReadItem]]] = defaultdict(list)
    for item in planner.create_local_plan().items:
        entry = entries[item.storage_index.fqn]
        part = next(p for p in entry.parts if p.offsets == tuple(item.storage_index.offset or ()))
        by_file[part.file].append((part, item))
    sources = _Sources()
    with ThreadPoolExecutor(READERS, "surefoot-read") as pool:
        for path, items in by_file.items():
            items.sort(key=lambda one: one[0].begin)
            with _reading(path) as file:
                filled = [
                    pool.submit(sources.fill, planner.resolve_tensor(item).detach(), file, part, item)
                    for part, item in items
                ]
                for one in filled:
                    one.result()


def read_part(entry: Entry, part: Part) -> Tensor:
    """One block as it lies in its file."""
    tensor = torch.empty(part.shape, dtype=dtype_of(entry))
    with _reading(part.file) as file:
        _Source().straight(_raw(tensor), file, part.begin)
    return tensor


@contextmanager
def _reading(path: Path) -> Iterator[io.FileIO]:
    try:
        with path.open("rb", buffering=0) as file:
            yield file
    except OSError as error:
        raise DoesNotFit(f"{path} cannot be read: {error}") from None


def _metadata(entry: Entry) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.shape)) for p in entry.parts]
    return TensorStorageMetadata(TensorProperties(dtype_of(entry)), torch.Size(entry.shape), chunks)


class _Sources(threading.local):
    """A source for each thread that reads."""

    def __init__(self) -> None:
        self._source = _Source()

    @torch.no_grad()
    def fill(self, to: Tensor, file: io.FileIO, part: Part, item: ReadItem) -> None:
        self._source.fill(to, file, part, item)


class _Source:
    """Brings bytes from a file into tensors wherever they are, with no more memory than one part of a tensor."""

    def __init__(self) -> None:
        self._pinned: Tensor | None = None

    def fill(self, to: Tensor, file: io.FileIO, part: Part, item: ReadItem) -> None:
        if not to.numel():
            return
        begin, lengths = tuple(item.storage_offsets), tuple(item.lengths)
        if not _in_a_row(part.shape, begin, lengths):
            whole = torch.empty(part.shape, dtype=to.dtype)
            self.straight(_raw(whole), file, part.begin)
            for d, (at, n) in enumerate(zip(begin, lengths, strict=True)):
                whole = whole.narrow(d, at, n)
            to.copy_(whole)
            return
        strides = [math.prod(part.shape[d + 1 :]) for d in range(len(part.shape))]
        first = part.begin + to.element_size() * sum(at * s for at, s in zip(begin, strides, strict=True))
        if to.is_contiguous() and (to.is_cuda or to.device.type == "cpu"):
            self.straight(_raw(to), file, first)
        else:
            fresh = torch.empty(to.shape, dtype=to.dtype)
            self.straight(_raw(fresh), file, first)
            to.copy_(fresh)

    def straight(self, to: Tensor, file: io.FileIO, begin: int) -> None:
        """Fill a row of bytes."""
        if not to.is_cuda:
            for at in range(0, to.numel(), CHUNK):
                _exactly(file, begin + at, to[at : at + CHUNK])
            return
        if self._pinned is None:
            self._pinned = torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True)
        for at in range(0, to.numel(), CHUNK):
            part = to[at : at + CHUNK]
            _exactly(file, begin + at, self._pinned[: part.numel()])
            part.copy_(self._pinned[: part.numel()])


def _raw(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _exactly(file: io.FileIO, begin: int, to: Tensor) -> None:
    """Fill it from there on; several threads may read one file so."""
    view = to.numpy().data
    while view:
        count = os.preadv(file.fileno(), [view], begin)
        if not count:
            raise DoesNotFit(f"{file.name} ends too early")
        view, begin = view[count:], begin + count


def _in_a_row(shape: Sequence[int], begin: Sequence[int], lengths: Sequence[int]) -> bool:
    """Whether a block within a block lies in the file without gaps."""
    cut = [d for d, n in enumerate(lengths) if n != 1]
    first = cut[0] if cut else len(shape)
    return all(lengths[d] == shape[d] and begin[d] == 0 for d in range(first + 1, len(shape)))
