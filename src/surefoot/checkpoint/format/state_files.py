"""The JSON state of a checkpoint, one file per rank, and whether all ranks' files are complete; no torch needed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.checkpoint.format.safetensors_headers import CheckpointMismatch, first_names, read_entries

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
