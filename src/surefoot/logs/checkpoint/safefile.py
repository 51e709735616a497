"""safetensors files: a header in JSON, checked before anything is believed, and the numbers part by part."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.logs.checkpoint.held import FLOATS, Contents, Held, Numbers, floats
from surefoot.logs.table import UnreadableInput

_LARGEST_HEADER = 100_000_000
"""The limit of the format itself."""
_KINDS = {
    "F64": ("float64", "<f8"),
    "F32": ("float32", "<f4"),
    "F16": ("float16", "<f2"),
    "BF16": ("bfloat16", "<u2"),
    "F8_E4M3": ("float8_e4m3", "u1"),
    "F8_E5M2": ("float8_e5m2", "u1"),
    "I64": ("int64", "<i8"),
    "I32": ("int32", "<i4"),
    "I16": ("int16", "<i2"),
    "I8": ("int8", "i1"),
    "U64": ("uint64", "<u8"),
    "U32": ("uint32", "<u4"),
    "U16": ("uint16", "<u2"),
    "U8": ("uint8", "u1"),
    "BOOL": ("bool", "u1"),
}
_MOST_DIMENSIONS = 64
"""As numpy and torch have it; the size of a tensor with a million dimensions would take hours to multiply out."""
_UNKNOWN = "unknown "
_COUNTER = "num_batches_tracked"


def fits(head: bytes) -> bool:
    return len(head) >= 9 and 2 <= _length(head) <= _LARGEST_HEADER and head[8:9] == b"{"


def read(path: Path) -> Contents:
    table, start = header(path)
    size = path.stat().st_size - start
    contents = Contents("safetensors")
    ends: list[tuple[int, int, str]] = []
    for name, entry in table.items():
        if name == "__metadata__":
            continue
        kind, shape, first, last = entry_of(path, name, entry)
        if last > size:
            raise UnreadableInput(
                f"{path} is cut off: its header promises {name} up to byte {last:,} of the data, and there are"
                f" {size:,}. The copy, the download or the save was broken off; get it again, or take an"
                " earlier checkpoint"
            )
        ends.append((first, last, name))
        dtype, width = _KINDS.get(kind, (_UNKNOWN + kind, ""))
        if width and last - first != prod(shape) * np.dtype(width).itemsize:
            raise UnreadableInput(
                f"{path} has a damaged header: {name} of {kind} and shape {list(shape)} cannot be {last - first:,}"
                " bytes"
            )
        _sort(contents, Held(name, dtype, shape, last - first, _Parts(path, start + first, dtype, width, prod(shape))))
    _apart(path, ends)
    return contents


def _sort(contents: Contents, held: Held) -> None:
    if held.dtype in FLOATS:
        contents.weights.append(held)
    elif held.dtype.startswith(_UNKNOWN):
        contents.skipped[f"tensors of the kind {held.dtype.removeprefix(_UNKNOWN)[:20]}"] += 1
    elif held.name.endswith(_COUNTER) and held.count == 1:
        contents.counters[held.name] = int(next(held.parts(1))[0])
    else:
        contents.leave_out(held.name, held.dtype, held.count)


class _Parts:
    """The numbers of one tensor, so many at a time."""

    def __init__(self, path: Path, start: int, dtype: str, width: str, count: int) -> None:
        self._path = path
        self._start = start
        self._dtype = dtype
        self._width = width
        self._count = count

    def __call__(self, size: int) -> Iterator[Numbers]:
        with self._path.open("rb") as stream:
            stream.seek(self._start)
            left = self._count
            while left > 0:
                raw = np.fromfile(stream, self._width, min(size, left))
                if not len(raw):
                    raise UnreadableInput(f"{self._path} got shorter while it was read")
                left -= len(raw)
                yield floats(raw, self._dtype)


def _length(head: bytes) -> int:
    return struct.unpack_from("<Q", head)[0]


def header(path: Path) -> tuple[dict[str, Any], int]:
    """What a file says of its tensors, by name, and where their bytes begin; raises Unreadable."""
    with path.open("rb") as stream:
        first = stream.read(8)
        length = _length(first) if len(first) == 8 else 0
        if not 2 <= length <= _LARGEST_HEADER:
            raise UnreadableInput(f"{path} is no safetensors file: its header would be {length:,} bytes long")
        text = stream.read(length)
    if len(text) < length:
        raise UnreadableInput(f"{path} is cut off in its header: {len(text):,} of {length:,} bytes. Get the file again")
    try:
        table = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise UnreadableInput(f"{path} has a damaged header: {error}. Get the file again") from None
    if not isinstance(table, dict):
        raise UnreadableInput(f"{path} has a damaged header: it is no table of tensors")
    return table, 8 + length


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            raise ValueError(f"{name[:200]} stands in it twice")
        table[name] = value
    return table


def entry_of(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Kind, shape, first and last byte of a tensor, checked."""
    try:
        kind, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise UnreadableInput(f"{path} has a damaged header: {name} lacks its dtype, shape or place") from None
    numbers = [first, last, *shape] if isinstance(shape, list) and len(shape) <= _MOST_DIMENSIONS else [None]
    if not isinstance(kind, str) or any(not isinstance(one, int) or not 0 <= one < 1 << 62 for one in numbers):
        raise UnreadableInput(f"{path} has a damaged header: {name} has an impossible dtype, shape or place")
    if last < first:
        raise UnreadableInput(f"{path} has a damaged header: {name} ends before it begins")
    return kind, tuple(shape), first, last


def _apart(path: Path, places: list[tuple[int, int, str]]) -> None:
    places.sort()
    for (_, end, name), (start, _, other) in pairwise(places):
        if start < end:
            raise UnreadableInput(f"{path} has a damaged header: {name} and {other} lie over each other")
