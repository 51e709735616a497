"""The content of tensors as bytes on the host.

This is done behind the training's back, in a thread beside it, and Python lets one thread work at a time: each call of
torch hands over to the other and asks for the turn back, and a run that its host holds up pays for both. So small
tensors go together, with a few calls for hundreds of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from surefoot.checkpoint.pinned import Pages

CHUNK = 1 << 25
"""Bytes that are on their way at a time."""
SMALL = CHUNK // 8
"""Bytes of a tensor up to which it goes together with others, which on a device is one more copy there."""
_JOINED = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32})
"""Types that are put together; others are rare."""
Contents = list[tuple[int, int]]
"""Numbers of tensors, and how many bytes of each: what a piece of memory holds, one behind the other."""

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

    def contents(self, tensors: Sequence[Tensor]) -> Iterator[tuple[memoryview, Contents]]:
        """The bytes of all, in their order, and whose they are; each piece is there until the next is asked for."""
        for group in _groups(tensors):
            several = [tensors[i] for i in group]
            flat = _flatten_dense_tensors(several) if len(several) > 1 else several[0].detach()
            sizes = [(i, tensors[i].nbytes) for i in group]
            for part in self._pieces(flat):
                yield part, sizes if len(several) > 1 else [(group[0], part.nbytes)]

    def _pieces(self, tensor: Tensor) -> Iterator[memoryview]:
        flat = as_bytes(tensor)
        if not flat.is_cuda:
            for begin in range(0, flat.numel(), CHUNK):
                yield flat[begin : begin + CHUNK].numpy().data
            return
        if self._pages is None:
            self._pages = _staged.pop() if _staged else Pages(CHUNK)
        pinned, stream = self._pages.memory, torch.cuda.current_stream(tensor.device)
        for begin in range(0, flat.numel(), CHUNK):
            part = flat[begin : begin + CHUNK]
            there = pinned[: part.numel()]
            there.copy_(part, non_blocking=True)
            stream.synchronize()
            yield there.numpy().data


def each_of(part: memoryview, contents: Contents) -> Iterator[tuple[int, memoryview]]:
    """What a piece holds of every tensor, by its number."""
    begin = 0
    for i, size in contents:
        yield i, part[begin : begin + size]
        begin += size


def _groups(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Numbers of tensors that follow each other and go together."""
    group: list[int] = []
    kind, room = None, 0
    for i, tensor in enumerate(tensors):
        size = tensor.nbytes
        own = (tensor.dtype, tensor.device) if size <= SMALL and _simple(tensor) else None
        if group and (own is None or own != kind or size > room):
            yield group
            group = []
        if not group:
            kind, room = own, CHUNK
        group.append(i)
        room -= size
    if group:
        yield group


def _simple(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.dtype in _JOINED and tensor.is_contiguous() and not tensor.is_neg()


def as_bytes(tensor: Tensor) -> Tensor:
    """The content as bytes in a row; of what does not lie so, a copy."""
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
