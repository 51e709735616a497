"""The files that each rank writes, a JSON state and a safetensors shard: what they hold, and whether that is complete.

Does not import torch.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.journal.safetensors_header import DTYPES, StoredTensorSpan, are_sizes, read_header

SCHEMA = 1
MAX_BYTES = 1 << 28
"""Size above which a file is not read."""
_REQUIRED: dict[str, type] = {
    "world_size": int,
    "rank": int,
    "tensors": list,
    "passing": list,
    "own": list,
    "aliases": dict,
    "optimizers": list,
    "schedulers": list,
    "extra": dict,
    "chance": dict,
}
"""Required keys and the types of their values."""
NOTES = "SUREFOOT"
"""The header key for what the format has no place for: global shapes, and further dtypes."""
CARRIED_AS: dict[str, tuple[str, int]] = {
    "complex64": ("F32", 2),
    "complex128": ("F64", 2),
    "float8_e4m3fnuz": ("U8", 1),
    "float8_e5m2fnuz": ("U8", 1),
    "float8_e8m0fnu": ("U8", 1),
}
"""Dtypes that not every reader of the format knows: the dtype they are stored as, and how many of it make one."""


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
        header = read_header(path)
        sharding = json.loads(header.metadata.get("DCP_SHARDING_INFO", "{}"))
        notes = json.loads(header.metadata.get(NOTES, "{}"))
        return {
            name: _tensor_part(path, name, span, sharding.get(name), notes.get(name, {}))
            for name, span in header.tensors.items()
        }
    except OSError as error:
        raise CheckpointMismatch(f"{path} cannot be read: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointMismatch(f"{path} has no valid header: {error}") from None


def _tensor_part(
    path: Path, name: str, span: StoredTensorSpan, sharding: Any, notes: Mapping[str, Any]
) -> tuple[str, tuple[int, ...], TensorPart]:
    """Dtype and full shape of a tensor, and the part of it that lies in this file."""
    dtype, shape = _torch_type(name, span, notes)
    offsets = _sizes([0] * len(shape) if sharding is None else sharding["saved_offsets"])
    if len(offsets) == len(span.shape):
        offsets = offsets[: len(shape)]  # a carried dtype may have one dimension more
    full_shape = _sizes(notes.get("shape", shape))
    if len(offsets) != len(shape) or len(full_shape) != len(shape):
        raise ValueError(f"{name} has {len(shape)} dimensions, but its offsets or full shape have another number")
    if any(at + n > most for at, n, most in zip(offsets, shape, full_shape, strict=True)):
        raise ValueError(f"{name} exceeds its full shape")
    return dtype, full_shape, TensorPart(path, span.begin, shape, offsets)


def _torch_type(name: str, span: StoredTensorSpan, notes: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Torch's dtype and shape of a tensor that may be stored as another dtype."""
    dtype = notes.get("dtype")
    if dtype is None:
        return DTYPES[span.dtype][0], span.shape
    carrier, count = CARRIED_AS[dtype]
    if span.dtype != carrier or (count > 1 and span.shape[-1:] != (count,)):
        raise ValueError(f"{name} cannot be {dtype}")
    return dtype, span.shape if count == 1 else span.shape[:-1]


def _sizes(values: Any) -> tuple[int, ...]:
    if not are_sizes(sizes := list(values)):
        raise ValueError(f"{str(values)[:200]} are not valid sizes")
    return tuple(sizes)


# -- states


def state_file(rank: int) -> str:
    return f"state-{rank + 1:05d}.json"


def read_states(folder: Path) -> list[dict[str, Any]]:
    """The states of all ranks."""
    first = _read(folder / state_file(0), 0)
    count = first["world_size"]
    missing = [state_file(rank) for rank in range(count) if not (folder / state_file(rank)).is_file()]
    if missing:
        raise CheckpointMismatch(
            f"{folder} lacks {', '.join(missing[:5])}: it was saved by {count} ranks, and the file of each is needed."
            " Use an older checkpoint"
        )
    rest = [_read(folder / state_file(rank), rank) for rank in range(1, count)]
    if any(state["world_size"] != count for state in rest):
        raise CheckpointMismatch(f"{folder} has files of saves by different numbers of ranks. Use an older checkpoint")
    return [first, *rest]


def _read(path: Path, rank: int) -> dict[str, Any]:
    try:
        if path.stat().st_size > MAX_BYTES:
            raise CheckpointMismatch(f"{path} is larger than {MAX_BYTES:,} bytes, too large for a state file")
        state = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, CheckpointMismatch):
            raise
        raise CheckpointMismatch(f"{path} cannot be read: {error}") from None
    schema = state.get("schema") if isinstance(state, dict) else None
    if schema != SCHEMA:
        raise CheckpointMismatch(
            f"{path} has schema {schema!r}, and this version reads {SCHEMA}. Use the version that saved it"
        )
    wrong = [key for key, kind in _REQUIRED.items() if type(state.get(key)) is not kind]
    if not wrong and (state["rank"] != rank or not 1 <= state["world_size"] <= 1 << 20):
        wrong = ["rank"]
    if not wrong and not all(_is_optimizer(optimizer) for optimizer in state["optimizers"]):
        wrong = ["optimizers"]
    if not wrong and not all(type(name) is str for key in ("tensors", "passing", "own") for name in state[key]):
        wrong = ["tensors"]
    if wrong:
        raise CheckpointMismatch(f"{path} is not a valid state: {', '.join(wrong)} is wrong. Use an older checkpoint")
    return state


def _is_optimizer(value: Any) -> bool:
    if not isinstance(value, dict) or type(value.get("state")) is not dict or type(value.get("groups")) is not list:
        return False
    groups = value["groups"]
    return type(value.get("class")) is str and all(type(g) is dict and type(g.get("params")) is list for g in groups)


def check_complete(folder: Path) -> None:
    """Raise CheckpointMismatch if a tensor that any rank refers to was written by none, or not completely.

    Ranks decide without communication who writes what, so this is checked before a checkpoint gets its name: ranks
    that were assumed to hold the same tensors, and do not, are found now and not at the resume.
    """
    states = read_states(folder)
    entries = read_entries(folder, len(states))
    missing: set[str] = set()
    for state in states:
        rank_only = set(state["own"])
        names = {rank_tensor_name(name, state["rank"]) if name in rank_only else name for name in state["tensors"]}
        missing |= {name for name in (*names, *tensor_names_in(state)) if name not in entries}
    if missing:
        raise CheckpointMismatch(
            f"{folder} lacks {first_names(sorted(missing))}, which no rank wrote. Use an older checkpoint"
        )


def tensor_names_in(state: Any) -> Iterator[str]:
    """The names of all tensors that a state refers to."""
    stack: list[Any] = [state]
    while stack:
        value = stack.pop()
        if isinstance(value, Mapping):
            if isinstance(value.get("$tensor"), str):
                yield value["$tensor"]
            stack.extend(value.values())
        elif isinstance(value, Sequence) and not isinstance(value, str):
            stack.extend(value)


def contains_tag(state: Any, tags: Sequence[str]) -> bool:
    """Whether one of the tags occurs in a state."""
    stack: list[Any] = [state]
    while stack:
        value = stack.pop()
        if isinstance(value, Mapping):
            if any(tag in value for tag in tags):
                return True
            stack.extend(value.values())
        elif isinstance(value, list):
            stack.extend(value)
    return False


def root_of(name: str) -> str:
    """The model that a tensor belongs to, by its name."""
    words = name.split(".")
    return ".".join(words[:2]) if words[0] == "extra" else "loose" if words[0].startswith("loose") else words[0]


def rank_tensor_name(name: str, rank: int) -> str:
    """The name in the files of a tensor that each rank has its own of; that of rank 0 has the plain name."""
    return name if rank == 0 else f"rank{rank}.{name}"


def unused_name(name: str, taken: Collection[str]) -> str:
    """The name, or a numbered variant that is free: two paths may have the same name."""
    if name not in taken:
        return name
    return next(variant for i in itertools.count(2) if (variant := f"{name}#{i}") not in taken)
