"""What lies in the safetensors files of a folder, from their headers alone; needs no torch."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.checkpoint.format.mismatch import DoesNotFit

NOTES = "SUREFOOT"
"""The key in a header under which stands what the format has no place for: whole shapes, and further types."""
FORMAT: dict[str, tuple[str, int]] = {
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
"""What the format calls types, what torch calls them, and their bytes."""
CARRIED: dict[str, tuple[str, int]] = {
    "complex64": ("F32", 2),
    "complex128": ("F64", 2),
    "float8_e4m3fnuz": ("U8", 1),
    "float8_e5m2fnuz": ("U8", 1),
    "float8_e8m0fnu": ("U8", 1),
}
"""Types that not every reader of the format knows, as what they are written, and how many of that make one."""
_LONGEST = 100_000_000  # of a header, as the format has it
_LARGEST = 1 << 62
_MOST_DIMENSIONS = 64


def shard_file(rank: int) -> str:
    """The file of one process, named as torch.distributed.checkpoint does."""
    return f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a tensor, and where it lies."""

    file: Path
    begin: int
    """The first byte within the file."""
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Where the block begins within the whole."""


@dataclass(slots=True)
class Entry:
    """A tensor in one or more files."""

    dtype: str
    """As torch calls it."""
    shape: tuple[int, ...]
    parts: list[Part] = field(default_factory=list)

    @property
    def itemsize(self) -> int:
        return item_size(self.dtype)


def item_size(dtype: str) -> int:
    """Bytes of one number."""
    if dtype in CARRIED:
        carrier, count = CARRIED[dtype]
        return FORMAT[carrier][1] * count
    return next(size for name, size in FORMAT.values() if name == dtype)


def tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of everything in the files of a folder."""
    count = sum(1 for _ in folder.glob("shard-*.safetensors"))
    return {name: (entry.dtype, entry.shape) for name, entry in read_entries(folder, count).items()}


def read_entries(folder: Path, count: int) -> dict[str, Entry]:
    """All tensors that so many processes wrote; each of them has to be there as a whole."""
    found: dict[str, Entry] = {}
    lacking = [shard_file(rank) for rank in range(count) if not (folder / shard_file(rank)).is_file()]
    if lacking or not count:
        raise DoesNotFit(
            f"{folder} lacks {', '.join(lacking) or 'tensors'}: it was saved by {count} processes, and the file of each"
            " is needed. Take an older checkpoint"
        )
    for rank in range(count):
        path = folder / shard_file(rank)
        for name, (dtype, shape, part) in _checked(path).items():
            entry = found.setdefault(name, Entry(dtype, shape))
            if (entry.dtype, entry.shape) != (dtype, shape):
                raise DoesNotFit(f"{path} tells of {name} otherwise than the files beside it")
            entry.parts.append(part)
    for name, entry in found.items():
        _check_whole(folder, name, entry)
    return found


def _check_whole(folder: Path, name: str, entry: Entry) -> None:
    held = sum(math.prod(part.shape) for part in entry.parts)
    if held != math.prod(entry.shape) or len({part.offsets for part in entry.parts}) != len(entry.parts):
        raise DoesNotFit(
            f"{folder} holds {held} of {math.prod(entry.shape)} numbers of {name}. Take an older checkpoint"
        )


def _checked(path: Path) -> dict[str, tuple[str, tuple[int, ...], Part]]:
    try:
        return _read(path)
    except OSError as error:
        raise DoesNotFit(f"{path} cannot be read: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DoesNotFit(f"{path} has no header that makes sense: {error}") from None


def _read(path: Path) -> dict[str, tuple[str, tuple[int, ...], Part]]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(_LONGEST, size - 8):
            raise ValueError(f"it would be {length} bytes long")
        told: dict[str, Any] = json.loads(file.read(length), object_pairs_hook=_without_repeats)
    about = told.pop("__metadata__", {})
    where = json.loads(about.get("DCP_SHARDING_INFO", "{}"))
    notes = json.loads(about.get(NOTES, "{}"))
    found = {}
    spans: list[tuple[int, int]] = []
    for name, one in told.items():
        dtype, shape = _as_torch(name, one, notes.get(name, {}))
        begin, end = _numbers(one["data_offsets"])
        if end - begin != math.prod(shape) * item_size(dtype) or end > size - 8 - length:
            raise ValueError(f"{name} does not lie within the file")
        offsets = _numbers(where[name]["saved_offsets"] if name in where else [0] * len(shape))
        if len(offsets) == len(one["shape"]):
            offsets = offsets[: len(shape)]  # what carries another type may have a dimension more
        whole = _numbers(notes.get(name, {}).get("shape", shape))
        if len(offsets) != len(shape) or len(whole) != len(shape):
            raise ValueError(f"{name} has {len(shape)} dimensions, and other things are told of it")
        if any(at + n > most for at, n, most in zip(offsets, shape, whole, strict=True)):
            raise ValueError(f"{name} reaches beyond its own shape")
        spans.append((begin, end))
        found[name] = (dtype, whole, Part(path, 8 + length + begin, shape, offsets))
    spans.sort()
    if any(one[1] > two[0] for one, two in itertools.pairwise(spans)):
        raise ValueError("two tensors lie over each other")
    return found


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A table of JSON; of a name that stands in it twice nobody can say which place is meant."""
    table: dict[str, Any] = {}
    for name, value in pairs:
        if name in table:
            raise ValueError(f"{name[:200]} stands in it twice")
        table[name] = value
    return table


def _as_torch(name: str, one: Mapping[str, Any], notes: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Type and shape as torch has them, of what may have been carried as something else."""
    shape = _numbers(one["shape"])
    dtype = notes.get("dtype")
    if dtype is None:
        return FORMAT[one["dtype"]][0], shape
    carrier, count = CARRIED[dtype]
    if one["dtype"] != carrier or (count > 1 and shape[-1:] != (count,)):
        raise ValueError(f"{name} cannot be {dtype}")
    return dtype, shape if count == 1 else shape[:-1]


def _numbers(told: Any) -> tuple[int, ...]:
    found = tuple(told)
    if len(found) > _MOST_DIMENSIONS or not all(type(n) is int and 0 <= n < _LARGEST for n in found):
        raise ValueError(f"{str(told)[:200]} are no sizes")
    return found
