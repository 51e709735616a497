"""safetensors files: a header in JSON, checked before anything is believed, and the numbers mapped from the disk."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surefoot.logs.checkpoint.held import FLOATS, Contents, Held, Numbers, floats
from surefoot.logs.table import Unreadable

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
_COUNTER = "num_batches_tracked"


def fits(head: bytes) -> bool:
    return len(head) >= 9 and 2 <= _length(head) <= _LARGEST_HEADER and head[8:9] == b"{"


def read(path: Path) -> Contents:
    header, start = _header(path)
    size = path.stat().st_size - start
    contents = Contents("safetensors")
    data: NDArray[np.uint8] = np.memmap(path, np.uint8, "r", start) if size > 0 else np.empty(0, np.uint8)
    ends: list[tuple[int, int, str]] = []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        kind, shape, first, last = _entry(path, name, entry)
        if last > size:
            raise Unreadable(
                f"{path} is cut off: its header promises {name} up to byte {last:,} of the data, and there are"
                f" {size:,}. The copy, the download or the save was broken off; get it again, or take an"
                " earlier checkpoint"
            )
        ends.append((first, last, name))
        dtype, width = _KINDS.get(kind, (kind, ""))
        if width and last - first != prod(shape) * np.dtype(width).itemsize:
            raise Unreadable(
                f"{path} has a damaged header: {name} of {kind} and shape {list(shape)} cannot be {last - first:,}"
                " bytes"
            )
        _sort(contents, name, dtype, shape, data[first:last].view(width) if width else None)
    _apart(path, ends)
    return contents


def _sort(contents: Contents, name: str, dtype: str, shape: tuple[int, ...], raw: NDArray[Any] | None) -> None:
    if raw is None:
        contents.skipped[f"tensors of the kind {dtype}"] += 1
    elif dtype in FLOATS:
        contents.weights.append(Held(name, dtype, shape, raw.nbytes, _Parts(raw, dtype)))
    elif name.endswith(_COUNTER) and raw.size == 1:
        contents.counters[name] = int(raw[0])
    else:
        contents.skipped["tensors of whole numbers (counters, masks, quantised weights)"] += 1


class _Parts:
    """The numbers of one tensor, so many at a time."""

    def __init__(self, raw: NDArray[Any], dtype: str) -> None:
        self._raw = raw
        self._dtype = dtype

    def __call__(self, size: int) -> Iterator[Numbers]:
        for at in range(0, len(self._raw), size):
            yield floats(np.asarray(self._raw[at : at + size]), self._dtype)


def _length(head: bytes) -> int:
    return struct.unpack_from("<Q", head)[0]


def _header(path: Path) -> tuple[dict[str, Any], int]:
    with path.open("rb") as stream:
        first = stream.read(8)
        length = _length(first) if len(first) == 8 else 0
        if not 2 <= length <= _LARGEST_HEADER:
            raise Unreadable(f"{path} is no safetensors file: its header would be {length:,} bytes long")
        text = stream.read(length)
    if len(text) < length:
        raise Unreadable(f"{path} is cut off in its header: {len(text):,} of {length:,} bytes. Get the file again")
    try:
        header = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{path} has a damaged header: {error}. Get the file again") from None
    if not isinstance(header, dict):
        raise Unreadable(f"{path} has a damaged header: it is no table of tensors")
    return header, 8 + length


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} stands in it twice")
    return table


def _entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    try:
        kind, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise Unreadable(f"{path} has a damaged header: {name} lacks its dtype, shape or place") from None
    numbers = [first, last, *shape] if isinstance(shape, list) else [None]
    if not isinstance(kind, str) or any(not isinstance(one, int) or not 0 <= one < 1 << 62 for one in numbers):
        raise Unreadable(f"{path} has a damaged header: {name} has an impossible dtype, shape or place")
    if last < first:
        raise Unreadable(f"{path} has a damaged header: {name} ends before it begins")
    return kind, tuple(shape), first, last


def _apart(path: Path, places: list[tuple[int, int, str]]) -> None:
    places.sort()
    for (_, end, name), (start, _, other) in pairwise(places):
        if start < end:
            raise Unreadable(f"{path} has a damaged header: {name} and {other} lie over each other")
