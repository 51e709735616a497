"""Host memory that a GPU writes to directly, made without holding up whoever uses the GPU meanwhile.

The driver hands out such memory at a GB or two a second and lets nobody launch anything until it is done. Memory that
is there already it takes over ten times as fast, and piece by piece.
"""

from __future__ import annotations

import contextlib
import mmap
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from surefoot.background import raise_if_exiting

PIECE = 64 << 20
"""Bytes that are taken over at a time, unless one tensor is larger."""
_ALIGN = 256


class Pages:
    """A piece of memory that is given back when this is gone."""

    def __init__(self, nbytes: int) -> None:
        held = mmap.mmap(-1, max(nbytes, 1))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a system without them
                held.madvise(mmap.MADV_HUGEPAGE)
        self.memory = torch.frombuffer(held, dtype=torch.uint8)
        self.memory.numpy().fill(0)  # now it is there; NumPy lets other threads run
        register(self.memory)
        weakref.finalize(self, release, self.memory)


def register(memory: Tensor) -> None:
    """Have the driver take this memory over."""
    driver: Any = torch.cuda.cudart()
    torch.cuda.check_error(driver.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))


def release(memory: Tensor) -> None:
    """Take it back, once nothing is on its way there any more."""
    with contextlib.suppress(Exception):  # at the end of a process the driver may be gone
        torch.cuda.synchronize()
        driver: Any = torch.cuda.cudart()
        driver.cudaHostUnregister(memory.data_ptr())


def pinned_like(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Pages]]:
    """Room for these tensors, and the pages it lies on, which are to be kept as long as that is used."""
    made: list[Tensor] = []
    pages: list[Pages] = []
    for several in _pieces(tensors):
        raise_if_exiting()
        piece = Pages(sum(_size(t) for t in several))
        pages.append(piece)
        offset = 0
        for t in several:
            flat = piece.memory[offset : offset + t.nbytes].view(t.dtype)
            made.append(flat.as_strided(t.shape, torch.empty_like(t, device="meta").stride()))
            offset += _size(t)
    return made, pages


def _pieces(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    piece: list[Tensor] = []
    size = 0
    for t in tensors:
        if piece and size + _size(t) > PIECE:
            yield piece
            piece, size = [], 0
        piece.append(t)
        size += _size(t)
    if piece:
        yield piece


def _size(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGN) * _ALIGN
