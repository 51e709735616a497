"""Arrays of tokens in memory or in files of any size: reading, writing, and raw or NumPy token files."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from surefoot.data.data_error import DataError
from surefoot.data.sample_sources import TextSources, text_places

IntArray = NDArray[Any]
_PROBES = 1024
"""How many spans, evenly spaced over all tokens, are read when a vocabulary is checked before the run."""


class TokenArray(Protocol):
    """A long array of integers, readable by range."""

    def __len__(self) -> int: ...
    def read(self, first: int, count: int) -> IntArray: ...


class MemoryTokens:
    """Tokens in memory."""

    def __init__(self, numbers: IntArray) -> None:
        self._numbers = numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, first: int, count: int) -> IntArray:
        return self._numbers[first : first + count]


class FileTokens:
    """Tokens in a file, each range read on demand.

    Read, not memory-mapped: mapped pages count as this process's memory until the whole file does, and touching the map
    of a file that was cut short or lies on a failing disk kills the process, where a read raises a clear error.
    """

    def __init__(self, path: Path, dtype: np.dtype[Any], *, start: int = 0, length: int) -> None:
        self.path = path
        self._dtype, self._start, self._length = dtype, start, length
        self._fd: int | None = None

    def __len__(self) -> int:
        return self._length

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fd": None}  # each worker opens the file itself

    def read(self, first: int, count: int) -> IntArray:
        count = max(0, min(count, self._length - first))
        offset, size = self._start + first * self._dtype.itemsize, count * self._dtype.itemsize
        if not hasattr(os, "pread"):  # Windows
            return np.fromfile(self.path, self._dtype, count, offset=offset)
        if self._fd is None:
            self._fd = os.open(self.path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._fd)
        data = b""
        while len(data) < size and (more := os.pread(self._fd, size - len(data), offset + len(data))):
            data += more
        if len(data) < size:
            raise OSError(f"{self.path} ends at byte {offset + len(data)}: it was cut short since the run began")
        return np.frombuffer(data, self._dtype)


class JoinedTokens:
    """Several token arrays as one."""

    def __init__(self, arrays: Sequence[TokenArray]) -> None:
        self._arrays = arrays
        self._starts = np.r_[0, np.cumsum([len(array) for array in arrays])]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, first: int, count: int) -> IntArray:
        at = int(np.searchsorted(self._starts, first, side="right")) - 1
        pieces: list[IntArray] = []
        while count > 0 and at < len(self._arrays):
            inside = min(count, int(self._starts[at + 1]) - first)
            pieces.append(self._arrays[at].read(first - int(self._starts[at]), inside))
            first, count, at = first + inside, count - inside, at + 1
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [np.empty(0, np.int64)])


@dataclass(frozen=True, slots=True)
class TokenStore:
    """Texts one after the other as tokens; text i is tokens `offsets[i]` to `offsets[i + 1]`."""

    tokens: TokenArray
    offsets: NDArray[np.int64]
    digests: NDArray[np.uint64]
    """Hash of the tokens of each text; equal texts have equal hashes."""
    loss_mask: TokenArray | None = None
    """1 for tokens to learn, 0 for others; None when all are."""
    sources: TextSources | None = None
    """File and line of each text, where they are known."""

    def source_of(self, spans: Sequence[tuple[int, int]]) -> str:
        """Where the tokens of these (first, count) spans come from."""
        if self.sources is not None:
            lasts = [(first, first + max(1, count) - 1) for first, count in spans]
            ends = [np.searchsorted(self.offsets, pair, side="right") - 1 for pair in lasts]
            return self.sources.describe([text for first, last in ends for text in range(int(first), int(last) + 1)])
        first, last = spans[0][0], spans[-1][0] + spans[-1][1]
        where = f" of {self.tokens.path}" if isinstance(self.tokens, FileTokens) else ""
        return f"tokens {first:,} to {last:,}{where}"

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.diff(self.offsets)


class TokenWriter:
    """Writes texts piece by piece; a text that turns out bad half-way can be dropped again."""

    def __init__(self, tokens: BinaryIO, dtype: np.dtype[Any], loss_mask: BinaryIO | None = None) -> None:
        self._tokens, self._dtype, self._loss_mask = tokens, dtype, loss_mask
        self._offsets, self._digests = [0], []
        self._places: list[tuple[int, int]] = []
        self._length = 0
        self._digest = xxhash.xxh3_64()

    def add(self, tokens: IntArray, loss_mask: IntArray | None = None) -> None:
        data = np.ascontiguousarray(tokens, dtype=self._dtype).tobytes()
        self._tokens.write(data)
        self._digest.update(data)
        if self._loss_mask is not None:
            mask = np.ones(len(tokens), np.uint8) if loss_mask is None else np.asarray(loss_mask, np.uint8)
            self._loss_mask.write(mask.tobytes())
        self._length += len(tokens)

    def end_text(self, place: tuple[int, int] = (0, 0)) -> None:
        """The text is complete; `place` is the number of its file, and its line there."""
        self._places.append(place)
        self._offsets.append(self._length)
        self._digests.append(self._digest.intdigest())
        self._digest.reset()

    def drop_text(self) -> None:
        self._length = self._offsets[-1]
        self._digest.reset()
        for file, itemsize in ((self._tokens, self._dtype.itemsize), (self._loss_mask, 1)):
            if file is not None:
                file.seek(self._length * itemsize)
                file.truncate()

    @property
    def num_texts(self) -> int:
        return len(self._digests)

    def sources(self, files: Sequence[Path]) -> TextSources | None:
        """Where the texts come from, whose places were given with `end_text`."""
        return TextSources(tuple(files), text_places(self._places)) if files else None

    def tables(self) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """The offsets and digests of the texts, for `TokenStore`."""
        return np.array(self._offsets, np.int64), np.array(self._digests, np.uint64)


def open_token_files(files: Sequence[Path], dtype: str) -> TokenStore:
    """The tokens of all files as one text; only sizes and headers are read."""
    arrays = [open_token_file(path, dtype) for path in files]
    tokens = arrays[0] if len(arrays) == 1 else JoinedTokens(arrays)
    return TokenStore(tokens, np.array([0, len(tokens)], np.int64), np.zeros(1, np.uint64))


def open_token_file(path: Path, dtype: str) -> FileTokens:
    """A .npy file, or a raw one whose size must be a multiple of the dtype's."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(np.lib.format.MAGIC_PREFIX))
        if magic == np.lib.format.MAGIC_PREFIX:
            return _open_numpy(path)
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}. Check the file and its permissions.") from None
    raw_dtype = np.dtype(dtype).newbyteorder("<")
    if size % raw_dtype.itemsize:
        raise DataError(
            f"{path} has {size} bytes, which is no multiple of the {raw_dtype.itemsize} bytes of one {dtype}: the file "
            "was cut short, or data.dtype is wrong"
        )
    return FileTokens(path, raw_dtype, length=size // raw_dtype.itemsize)


def _open_numpy(path: Path) -> FileTokens:
    try:
        mapped = np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise DataError(f"{path} begins like a NumPy file but cannot be read: {error}") from None
    if mapped.ndim != 1 or mapped.dtype.kind not in "iu":
        raise DataError(f"{path} holds {mapped.dtype} of shape {mapped.shape}: expected a 1-D array of integers")
    return FileTokens(path, mapped.dtype, start=int(mapped.offset), length=len(mapped))


def find_token_outside(tokens: TokenArray, vocab: int) -> tuple[int, int] | None:
    """The first (position, token) beyond the vocabulary in about 1000 evenly spaced spans of 64 tokens."""
    starts: Any = np.unique(np.linspace(0, max(0, len(tokens) - 64), _PROBES).astype(np.int64))
    for start in starts.tolist():
        span = tokens.read(start, 64).astype(np.int64)
        outside = np.flatnonzero((span < 0) | (span >= vocab))
        if len(outside):
            return start + int(outside[0]), int(span[outside[0]])
    return None
