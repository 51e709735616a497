"""Which tensors the safetensors files of a folder hold, from their headers alone; does not import torch."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NOTES = "SUREFOOT"
"""The header key for what the format has no place for: global shapes, and further dtypes."""
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
CARRIED_AS: dict[str, tuple[str, int]] = {
    "complex64": ("F32", 2),
    "complex128": ("F64", 2),
    "float8_e4m3fnuz": ("U8", 1),
    "float8_e5m2fnuz": ("U8", 1),
    "float8_e8m0fnu": ("U8", 1),
}
"""Dtypes that not every reader of the format knows: the dtype they are stored as, and how many of it make one."""
_MAX_HEADER_BYTES = 100_000_000  # by the specification
_MAX_SIZE = 1 << 62
_MAX_DIMENSIONS = 64


class CheckpointMismatch(ValueError):
    """A checkpoint cannot be read, or belongs to another run than the live one; nothing was written."""


def first_names(names: Sequence[str]) -> str:
    """The first five names, and the number of the others."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def shard_file(rank: int) -> str:
    """The file of one rank, named as torch.distributed.checkpoint does."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


@dataclass(frozen=True, slots=True)
class TensorPart:
    """A block of a tensor, and where it is stored."""

    file: Path
    begin: int
    """Its first byte in the file."""
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Where the block begins in the full tensor."""


@dataclass(slots=True)
class TensorEntry:
    """A tensor in one or more files."""

    dtype: str
    """Torch's name of it."""
    shape: tuple[int, ...]
    parts: list[TensorPart] = field(default_factory=list)

    @property
    def itemsize(self) -> int:
        return item_size(self.dtype)


def item_size(dtype: str) -> int:
    """Bytes of one value."""
    if dtype in CARRIED_AS:
        carrier, count = CARRIED_AS[dtype]
        return DTYPES[carrier][1] * count
    return next(size for name, size in DTYPES.values() if name == dtype)


def list_tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every tensor in the files of a folder."""
    count = sum(1 for _ in folder.glob("shard-*.safetensors"))
    return {name: (entry.dtype, entry.shape) for name, entry in read_entries(folder, count).items()}


def read_entries(folder: Path, count: int) -> dict[str, TensorEntry]:
    """All tensors that `count` ranks wrote; raises CheckpointMismatch if any is incomplete."""
    entries: dict[str, TensorEntry] = {}
    missing = [shard_file(rank) for rank in range(count) if not (folder / shard_file(rank)).is_file()]
    if missing or not count:
        raise CheckpointMismatch(
            f"{folder} lacks {', '.join(missing) or 'tensors'}: it was saved by {count} ranks, and the file of each is"
            " needed. Use an older checkpoint"
        )
    for rank in range(count):
        path = folder / shard_file(rank)
        for name, (dtype, shape, part) in _read_header(path).items():
            entry = entries.setdefault(name, TensorEntry(dtype, shape))
            if (entry.dtype, entry.shape) != (dtype, shape):
                raise CheckpointMismatch(f"{path} has another dtype or shape for {name} than the files of other ranks")
            entry.parts.append(part)
    for name, entry in entries.items():
        _check_entry(folder, name, entry)
    return entries


def _check_entry(folder: Path, name: str, entry: TensorEntry) -> None:
    stored, expected = sum(math.prod(part.shape) for part in entry.parts), math.prod(entry.shape)
    if stored != expected or len({part.offsets for part in entry.parts}) != len(entry.parts):
        raise CheckpointMismatch(f"{folder} holds {stored} of {expected} values of {name}. Use an older checkpoint")


def _read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...], TensorPart]]:
    try:
        return _parse_header(path)
    except OSError as error:
        raise CheckpointMismatch(f"{path} cannot be read: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointMismatch(f"{path} has no valid header: {error}") from None


def _parse_header(path: Path) -> dict[str, tuple[str, tuple[int, ...], TensorPart]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"it would be {length} bytes long")
        header: dict[str, Any] = json.loads(file.read(length), object_pairs_hook=_without_repeats)
    metadata = header.pop("__metadata__", {})
    sharding = json.loads(metadata.get("DCP_SHARDING_INFO", "{}"))
    notes = json.loads(metadata.get(NOTES, "{}"))
    tensors = {}
    spans: list[tuple[int, int]] = []
    for name, info in header.items():
        dtype, shape = _torch_type(name, info, notes.get(name, {}))
        begin, end = _sizes(info["data_offsets"])
        if end - begin != math.prod(shape) * item_size(dtype) or end > size - 8 - length:
            raise ValueError(f"{name} does not lie within the file")
        offsets = _sizes(sharding[name]["saved_offsets"] if name in sharding else [0] * len(shape))
        if len(offsets) == len(info["shape"]):
            offsets = offsets[: len(shape)]  # a carried dtype may have one dimension more
        full_shape = _sizes(notes.get(name, {}).get("shape", shape))
        if len(offsets) != len(shape) or len(full_shape) != len(shape):
            raise ValueError(f"{name} has {len(shape)} dimensions, but its offsets or full shape have another number")
        if any(at + n > most for at, n, most in zip(offsets, shape, full_shape, strict=True)):
            raise ValueError(f"{name} exceeds its full shape")
        spans.append((begin, end))
        tensors[name] = (dtype, full_shape, TensorPart(path, 8 + length + begin, shape, offsets))
    spans.sort()
    if any(span[1] > following[0] for span, following in itertools.pairwise(spans)):
        raise ValueError("two tensors overlap")
    return tensors


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a repeated name is an error, because it is ambiguous."""
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            raise ValueError(f"{name[:200]} occurs twice")
        table[name] = value
    return table


def _torch_type(name: str, info: Mapping[str, Any], notes: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Torch's dtype and shape of a tensor that may be stored as another dtype."""
    shape = _sizes(info["shape"])
    dtype = notes.get("dtype")
    if dtype is None:
        return DTYPES[info["dtype"]][0], shape
    carrier, count = CARRIED_AS[dtype]
    if info["dtype"] != carrier or (count > 1 and shape[-1:] != (count,)):
        raise ValueError(f"{name} cannot be {dtype}")
    return dtype, shape if count == 1 else shape[:-1]


def _sizes(values: Any) -> tuple[int, ...]:
    sizes = tuple(values)
    if len(sizes) > _MAX_DIMENSIONS or not all(type(n) is int and 0 <= n < _MAX_SIZE for n in sizes):
        raise ValueError(f"{str(values)[:200]} are not valid sizes")
    return sizes
