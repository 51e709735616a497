"""The header of a safetensors file: a JSON table of its tensors, validated before anything is read by it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
}
"""The format's name of each dtype, torch's name, and its bytes."""
MAX_HEADER_BYTES = 100_000_000
"""The limit set by the format."""
_MAX_DIMENSIONS = 64
"""The limit of numpy and torch; multiplying out the size of a tensor with a million dimensions would take hours."""
_MAX_SIZE = 1 << 62


class BadSafetensors(ValueError):
    """What is wrong with a file; `cut_off` says that its end is missing."""

    def __init__(self, reason: str, *, cut_off: bool = False) -> None:
        super().__init__(reason)
        self.cut_off = cut_off


@dataclass(frozen=True, slots=True)
class StoredTensorSpan:
    """One entry of the table; the dtype is the format's name of it and may be unknown."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Its first byte in the file, and the one after its last."""
    end: int


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """Which tensors a file holds, and the texts that its writer has added."""

    tensors: dict[str, StoredTensorSpan]
    metadata: dict[str, Any]


def read_header(path: Path) -> SafetensorsHeader:
    """The header of a file whose tensors lie within it and do not overlap; raises BadSafetensors and OSError."""
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        length = int.from_bytes(first, "little") if len(first) == 8 else 0
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise BadSafetensors(f"its header would be {length:,} bytes long")
        text = file.read(length)
    if len(text) < length:
        raise BadSafetensors(f"its header has {len(text):,} of {length:,} bytes", cut_off=True)
    try:
        table = json.loads(text, object_pairs_hook=_unique_names)
    except (ValueError, RecursionError) as error:
        raise BadSafetensors(str(error)) from None
    if not isinstance(table, dict):
        raise BadSafetensors("it is not a table of tensors")
    metadata = table.pop("__metadata__", {})
    start = 8 + length
    tensors = {name: _parse_span(name, entry, start, size) for name, entry in table.items()}
    spans = sorted((span.begin, span.end, name) for name, span in tensors.items())
    for (_, end, name), (begin, _, other) in pairwise(spans):
        if begin < end:
            raise BadSafetensors(f"{name} and {other} overlap")
    return SafetensorsHeader(tensors, metadata if isinstance(metadata, dict) else {})


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a repeated name is an error, because it is ambiguous."""
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            raise ValueError(f"{name[:200]} occurs twice")
        table[name] = value
    return table


def _parse_span(name: str, entry: Any, start: int, size: int) -> StoredTensorSpan:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise BadSafetensors(f"{name} lacks its dtype, shape or offsets") from None
    if not (isinstance(dtype, str) and isinstance(shape, list) and are_sizes(shape) and are_sizes([begin, end])):
        raise BadSafetensors(f"{name} has an impossible dtype, shape or offset")
    if end < begin:
        raise BadSafetensors(f"{name} ends before it begins")
    if start + end > size:
        reason = f"{name} does not lie within the file: it ends at byte {end:,} of the data, which has {size - start:,}"
        raise BadSafetensors(reason, cut_off=True)
    if dtype in DTYPES and end - begin != prod(shape) * DTYPES[dtype][1]:
        raise BadSafetensors(f"{name} of {dtype} and shape {shape} cannot be {end - begin:,} bytes")
    return StoredTensorSpan(dtype, tuple(shape), start + begin, start + end)


def are_sizes(values: list[Any]) -> bool:
    """Whether these can be the sizes of a tensor's dimensions, or offsets in them."""
    return len(values) <= _MAX_DIMENSIONS and all(type(n) is int and 0 <= n < _MAX_SIZE for n in values)
