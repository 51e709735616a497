"""Files of token numbers, larger than memory if need be: raw ones as most tools write them, and NumPy's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.data.problem import DataError
from surefoot.data.store import FileTokens, IntArray, TokenArray, TokenStore

_PROBES = 1024
"""Places looked at, evenly over all tokens, when a vocabulary is checked before the run."""


class JoinedTokens:
    """Several files as one row of tokens."""

    def __init__(self, parts: Sequence[TokenArray]) -> None:
        self._parts = parts
        self._starts = np.r_[0, np.cumsum([len(part) for part in parts])]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, first: int, count: int) -> IntArray:
        at = int(np.searchsorted(self._starts, first, side="right")) - 1
        found: list[IntArray] = []
        while count > 0 and at < len(self._parts):
            inside = min(count, int(self._starts[at + 1]) - first)
            found.append(self._parts[at].read(first - int(self._starts[at]), inside))
            first, count, at = first + inside, count - inside, at + 1
        return found[0] if len(found) == 1 else np.concatenate(found or [np.empty(0, np.int64)])


def open_token_files(files: Sequence[Path], dtype: str) -> TokenStore:
    """The tokens of all files in a row; nothing but sizes and headers is read."""
    parts = [open_token_file(path, dtype) for path in files]
    tokens = parts[0] if len(parts) == 1 else JoinedTokens(parts)
    return TokenStore(tokens, np.array([0, len(tokens)], np.int64), np.zeros(1, np.uint64))


def open_token_file(path: Path, dtype: str) -> FileTokens:
    """One file, whose size must be right for its numbers."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(np.lib.format.MAGIC_PREFIX))
        if magic == np.lib.format.MAGIC_PREFIX:
            return _numpy(path)
        size = path.stat().st_size
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}. Check the file and who may read it.") from None
    kind = np.dtype(dtype).newbyteorder("<")
    if size % kind.itemsize:
        raise DataError(
            f"{path} has {size} bytes, which is no multiple of the {kind.itemsize} bytes of one {dtype}: the file was "
            "cut short, or data.dtype is another one"
        )
    return FileTokens(path, kind, length=size // kind.itemsize)


def _numpy(path: Path) -> FileTokens:
    try:
        mapped = np.lib.format.open_memmap(path, mode="r")
    except ValueError as error:
        raise DataError(f"{path} begins like a file of NumPy but is none that can be read: {error}") from None
    if mapped.ndim != 1 or mapped.dtype.kind not in "iu":
        raise DataError(f"{path} holds {mapped.dtype} of shape {mapped.shape}: expected one row of whole numbers")
    return FileTokens(path, mapped.dtype, start=int(mapped.offset), length=len(mapped))


def find_token_outside(tokens: TokenArray, vocab: int) -> tuple[int, int] | None:
    """The first (place, token) found beyond the vocabulary in about a thousand places, 64 tokens in each."""
    places: Any = np.unique(np.linspace(0, max(0, len(tokens) - 64), _PROBES).astype(np.int64))
    for place in places.tolist():
        read = tokens.read(place, 64).astype(np.int64)
        wrong = np.flatnonzero((read < 0) | (read >= vocab))
        if len(wrong):
            return place + int(wrong[0]), int(read[wrong[0]])
    return None
