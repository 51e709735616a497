"""safetensors files, read with numpy: the JSON header is validated first, then tensors are read in chunks."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.inspect.contents import FLOAT_DTYPES, CheckpointContents, Numbers, StoredTensor, to_floats
from surefoot.logs.log_diagnosis import UnreadableInput

_MAX_HEADER_BYTES = 100_000_000
"""The limit set by the format."""
_DTYPES = {
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
_MAX_DIMENSIONS = 64
"""The limit of numpy and torch; multiplying out the size of a tensor with a million dimensions would take hours."""
_UNKNOWN = "unknown "
_COUNTER = "num_batches_tracked"


def is_safetensors(head: bytes) -> bool:
    return len(head) >= 9 and 2 <= _length(head) <= _MAX_HEADER_BYTES and head[8:9] == b"{"


def read_safetensors(path: Path) -> CheckpointContents:
    table, start = read_header(path)
    size = path.stat().st_size - start
    contents = CheckpointContents("safetensors")
    spans: list[tuple[int, int, str]] = []
    for name, entry in table.items():
        if name == "__metadata__":
            continue
        kind, shape, first, last = parse_entry(path, name, entry)
        if last > size:
            raise UnreadableInput(
                f"{path} is cut off: its header lists {name} up to byte {last:,} of the data, which has {size:,}."
                " The copy, download or save was interrupted; get the file again, or use an earlier checkpoint"
            )
        spans.append((first, last, name))
        dtype, width = _DTYPES.get(kind, (_UNKNOWN + kind, ""))
        if width and last - first != prod(shape) * np.dtype(width).itemsize:
            raise UnreadableInput(
                f"{path} has a damaged header: {name} of {kind} and shape {list(shape)} cannot be {last - first:,}"
                " bytes"
            )
        chunks = _FileChunks(path, start + first, dtype, width, prod(shape))
        _add_tensor(contents, StoredTensor(name, dtype, shape, last - first, chunks))
    _check_no_overlap(path, spans)
    return contents


def _add_tensor(contents: CheckpointContents, tensor: StoredTensor) -> None:
    if tensor.dtype in FLOAT_DTYPES:
        contents.weights.append(tensor)
    elif tensor.dtype.startswith(_UNKNOWN):
        contents.skipped[f"tensors of the unknown dtype {tensor.dtype.removeprefix(_UNKNOWN)[:20]}"] += 1
    elif tensor.name.endswith(_COUNTER) and tensor.numel == 1:
        contents.counters[tensor.name] = int(next(tensor.chunks(1))[0])
    else:
        contents.skip_integer_tensor(tensor.name, tensor.dtype, tensor.numel)


class _FileChunks:
    """Reads the values of one tensor from the file in chunks."""

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
                    raise UnreadableInput(f"{self._path} got shorter while it was being read")
                left -= len(raw)
                yield to_floats(raw, self._dtype)


def _length(head: bytes) -> int:
    return struct.unpack_from("<Q", head)[0]


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header's entries by tensor name, and the offset of the data; raises `UnreadableInput`."""
    with path.open("rb") as stream:
        first = stream.read(8)
        length = _length(first) if len(first) == 8 else 0
        if not 2 <= length <= _MAX_HEADER_BYTES:
            raise UnreadableInput(f"{path} is not a safetensors file: its header would be {length:,} bytes long")
        text = stream.read(length)
    if len(text) < length:
        raise UnreadableInput(f"{path} is cut off in its header: {len(text):,} of {length:,} bytes. Get the file again")
    try:
        table = json.loads(text, object_pairs_hook=_unique_names)
    except (ValueError, RecursionError) as error:
        raise UnreadableInput(f"{path} has a damaged header: {error}. Get the file again") from None
    if not isinstance(table, dict):
        raise UnreadableInput(f"{path} has a damaged header: it is not a table of tensors")
    return table, 8 + length


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            raise ValueError(f"{name[:200]} occurs twice")
        table[name] = value
    return table


def parse_entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """Validated dtype, shape, first and last byte of a tensor."""
    try:
        kind, shape, (first, last) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise UnreadableInput(f"{path} has a damaged header: {name} lacks its dtype, shape or offsets") from None
    numbers = [first, last, *shape] if isinstance(shape, list) and len(shape) <= _MAX_DIMENSIONS else [None]
    if not isinstance(kind, str) or any(not isinstance(value, int) or not 0 <= value < 1 << 62 for value in numbers):
        raise UnreadableInput(f"{path} has a damaged header: {name} has an impossible dtype, shape or offset")
    if last < first:
        raise UnreadableInput(f"{path} has a damaged header: {name} ends before it begins")
    return kind, tuple(shape), first, last


def _check_no_overlap(path: Path, spans: list[tuple[int, int, str]]) -> None:
    spans.sort()
    for (_, end, name), (start, _, other) in pairwise(spans):
        if start < end:
            raise UnreadableInput(f"{path} has a damaged header: {name} and {other} overlap")
