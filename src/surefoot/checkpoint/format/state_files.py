"""The JSON of a checkpoint, one file a process; needs no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.checkpoint.format.mismatch import DoesNotFit

SCHEMA = 1
MOST = 1 << 28
"""Bytes of one file, above which it is not read."""
_SHAPE: dict[str, type] = {
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
"""What has to be in it."""


def state_file(rank: int) -> str:
    return f"state-{rank + 1:05d}.json"


def read_states(folder: Path) -> list[dict[str, Any]]:
    """What every process told."""
    first = _read(folder / state_file(0), 0)
    count = first["world_size"]
    lacking = [state_file(rank) for rank in range(count) if not (folder / state_file(rank)).is_file()]
    if lacking:
        raise DoesNotFit(
            f"{folder} lacks {', '.join(lacking[:5])}: it was saved by {count} processes, and the file of each is"
            " needed. Take an older checkpoint"
        )
    rest = [_read(folder / state_file(rank), rank) for rank in range(1, count)]
    if any(told["world_size"] != count for told in rest):
        raise DoesNotFit(f"{folder} has files of saves by different numbers of processes. Take an older checkpoint")
    return [first, *rest]


def _read(path: Path, rank: int) -> dict[str, Any]:
    try:
        if path.stat().st_size > MOST:
            raise DoesNotFit(f"{path} is too large to be a state")
        told = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise error if isinstance(error, DoesNotFit) else DoesNotFit(f"{path} cannot be read: {error}") from None
    schema = told.get("schema") if isinstance(told, dict) else None
    if schema != SCHEMA:
        raise DoesNotFit(
            f"{path} has schema {schema!r}, and this version reads {SCHEMA}. Use the version it was saved by"
        )
    wrong = [key for key, kind in _SHAPE.items() if type(told.get(key)) is not kind]
    if not wrong and (told["rank"] != rank or not 1 <= told["world_size"] <= 1 << 20):
        wrong = ["rank"]
    if not wrong and not all(_is_optimizer(one) for one in told["optimizers"]):
        wrong = ["optimizers"]
    if not wrong and not all(type(name) is str for key in ("tensors", "passing", "own") for name in told[key]):
        wrong = ["tensors"]
    if wrong:
        raise DoesNotFit(f"{path} holds no state: {', '.join(wrong)} cannot be right. Take an older checkpoint")
    return told


def _is_optimizer(told: Any) -> bool:
    if not isinstance(told, dict) or type(told.get("state")) is not dict or type(told.get("groups")) is not list:
        return False
    groups = told["groups"]
    return type(told.get("class")) is str and all(type(g) is dict and type(g.get("params")) is list for g in groups)


def tensors_in(told: Any) -> Iterator[str]:
    """The names of all tensors that a state refers to."""
    heap: list[Any] = [told]
    while heap:
        one = heap.pop()
        if isinstance(one, Mapping):
            if isinstance(one.get("$tensor"), str):
                yield one["$tensor"]
            heap.extend(one.values())
        elif isinstance(one, Sequence) and not isinstance(one, str):
            heap.extend(one)


def has_any(told: Any, tags: Sequence[str]) -> bool:
    """Whether one of the tags occurs."""
    heap: list[Any] = [told]
    while heap:
        one = heap.pop()
        if isinstance(one, Mapping):
            if any(tag in one for tag in tags):
                return True
            heap.extend(one.values())
        elif isinstance(one, list):
            heap.extend(one)
    return False


def root_of(name: str) -> str:
    """The model that a tensor belongs to, by its name."""
    words = name.split(".")
    return ".".join(words[:2]) if words[0] == "extra" else "loose" if words[0].startswith("loose") else words[0]


def own_name(name: str, rank: int) -> str:
    """What a process calls a tensor of its own in the files; the first one's has the plain name."""
    return name if rank == 0 else f"rank{rank}.{name}"
