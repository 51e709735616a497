"""Token numbers by their place, in memory or in a file of any size, and how they are written."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

IntArray = NDArray[Any]


class TokenArray(Protocol):
    """A long row of whole numbers of which any part can be had."""

    def __len__(self) -> int: ...
    def read(self, first: int, count: int) -> IntArray: ...


class MemoryTokens:
    """Tokens that are already here."""

    def __init__(self, numbers: IntArray) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, first: int, count: int) -> IntArray:
        return self._numbers[first : first + count]


class FileTokens:
    """Tokens in a file, each part read when asked for.

    Read and not mapped: pages of a map count as this process's memory until the whole file does, and a file that was
    cut short or lies on a failing disk kills whoever touches its map, where a read raises an error that can be named.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], *, start: int = 0, length: int) -> None:
        self.path = path
        self._dtype, self._start, self._length = dtype, start, length
        self._file: int | None = None

    def __len__(self) -> int:
        return self._length

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}  # a worker opens it for itself

    def read(self, first: int, count: int) -> IntArray:
        count = max(0, min(count, self._length - first))
        place, size = self._start + first * self._dtype.itemsize, count * self._dtype.itemsize
        if not hasattr(os, "pread"):  # Windows
            return np.fromfile(self.path, self._dtype, count, offset=place)
        if self._file is None:
            self._file = os.open(self.path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
        read = b""
        while len(read) < size and (more := os.pread(self._file, size - len(read), place + len(read))):
            read += more
        if len(read) < size:
            raise OSError(f"{self.path} ends at byte {place + len(read)}: it was cut short since the run began")
        return np.frombuffer(read, self._dtype)


@dataclass(frozen=True, slots=True)
class TokenStore:
    """Texts one after the other as tokens; text i is tokens `offsets[i]` to `offsets[i + 1]`."""

    tokens: TokenArray
    offsets: NDArray[np.int64]
    digests: NDArray[np.uint64]
    """Of the tokens of each text: two that are alike have the same."""
    loss_mask: TokenArray | None = None
    """1 for tokens that are to be learned, where that is not all of them."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)


class TokenWriter:
    """Takes texts piece by piece; one that turns out bad half-way is dropped as if it had never come."""

    def __init__(self, tokens: BinaryIO, dtype: np.dtype[Any], counted: BinaryIO | None = None) -> None:
        self._tokens, self._dtype, self._counted = tokens, dtype, counted
        self._offsets, self._digests = [0], []
        self._length = 0
        self._digest = xxhash.xxh3_64()

    def add(self, numbers: IntArray, loss_mask: IntArray | None = None) -> None:
        data = np.ascontiguousarray(numbers, dtype=self._dtype).tobytes()
        self._tokens.write(data)
        self._digest.update(data)
        if self._counted is not None:
            marks = np.ones(len(numbers), np.uint8) if loss_mask is None else np.asarray(loss_mask, np.uint8)
            self._counted.write(marks.tobytes())
        self._length += len(numbers)

    def end_text(self) -> None:
        self._offsets.append(self._length)
        self._digests.append(self._digest.intdigest())
        self._digest.reset()

    def drop_text(self) -> None:
        self._length = self._offsets[-1]
        self._digest.reset()
        for file, size in ((self._tokens, self._dtype.itemsize), (self._counted, 1)):
            if file is not None:
                file.seek(self._length * size)
                file.truncate()

    @property
    def num_texts(self) -> int:
        return len(self._digests)

    def tables(self) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        return np.array(self._offsets, np.int64), np.array(self._digests, np.uint64)
