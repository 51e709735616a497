"""Nested state as plain JSON and back, with names where tensors stood; what cannot be told so is left out."""

from __future__ import annotations

import base64
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.state.tree import Nested, Stateful

PutTensor = Callable[[str, Any], dict[str, Any] | None]
"""Takes a tensor (or its slot) with the path of its place; what stands for it, or None if it cannot be kept."""
GetTensor = Callable[[str, Mapping[str, Any]], Any]
"""The tensor of a name, with what was noted beside it."""

_BARE = (bool, int, float, str, type(None))
_DEEPEST = 64


class Plain:
    """Writes one state down."""

    def __init__(self, put: PutTensor, is_tensor: Callable[[Any], bool]) -> None:
        self._put = put
        self._is_tensor = is_tensor
        self.left_out: list[str] = []
        """Paths of what could not be told in JSON, with its type."""

    def told(self, value: Any, path: str, depth: int = 0) -> Any:
        if depth > _DEEPEST:
            return self._leave(path, value)
        if self._is_tensor(value):
            named = self._put(path, value)
            return self._leave(path, value) if named is None else named
        if type(value) in _BARE:
            return value if not isinstance(value, float) or np.isfinite(value) else {"$float": str(value)}
        if isinstance(value, Nested):
            return {"$nested": self.told(value.state, path, depth + 1)}
        return self._container(value, path, depth + 1)

    def _container(self, value: Any, path: str, depth: int) -> Any:
        if isinstance(value, dict):
            return self._dict(value, path, depth)
        if isinstance(value, list | tuple | deque | set | frozenset):
            parts = [self.told(v, f"{path}.{i}", depth) for i, v in enumerate(value)]
            if type(value) is list:
                return parts
            told: dict[str, Any] = {"$" + _kind(value): parts}
            return told | ({"maxlen": value.maxlen} if isinstance(value, deque) else {})
        return self._other(value, path)

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        plain = all(type(k) is str and not k.startswith("$") for k in value)
        if plain and type(value) in (dict, OrderedDict, defaultdict):
            return {k: self.told(v, f"{path}.{k}", depth) for k, v in value.items()}
        pairs = [[self.told(k, f"{path}.{i}", depth), self.told(v, f"{path}.{k}", depth)]
                 for i, (k, v) in enumerate(value.items())]  # fmt: skip
        return {"$dict": pairs}

    def _other(self, value: Any, path: str) -> Any:
        for known, tell in _TELL:
            if isinstance(value, known):
                return tell(value)
        if isinstance(value, Tensor) and value.dtype is torch.uint8 and value.device.type == "cpu":
            return {"$random": base64.b64encode(value.numpy().tobytes()).decode()}  # of a generator
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _NUMBERS:
            return _told_numbers(np.asarray(value), scalar=isinstance(value, np.generic))
        return self._leave(path, value)

    def _leave(self, path: str, value: Any) -> dict[str, Any]:
        self.left_out.append(f"{path} ({type(value).__name__})")
        return {"$left_out": type(value).__name__}


def _kind(value: Any) -> str:
    return next(name for name in ("tuple", "deque", "frozenset", "set") if isinstance(value, _KINDS[name]))


_KINDS: dict[str, Any] = {"tuple": tuple, "deque": deque, "frozenset": frozenset, "set": set}


def untold(told: Any, live: Any, tensor: GetTensor) -> Any:
    """What was written down; what was left out then, as it stands in `live` now."""
    if type(told) in _BARE:
        return told
    if isinstance(told, list):
        now = live if isinstance(live, list) and len(live) == len(told) else [None] * len(told)
        return [untold(v, was, tensor) for v, was in zip(told, now, strict=True)]
    if not isinstance(told, dict):
        raise ValueError(f"a {type(told).__name__} has no place in a state")
    tag = next((k for k in told if k.startswith("$")), None)
    if tag is None:
        now = live if isinstance(live, dict) else {}
        return {k: untold(v, now.get(k), tensor) for k, v in told.items()}
    return _tagged(tag, told, live, tensor)


def _tagged(tag: str, told: dict[str, Any], live: Any, tensor: GetTensor) -> Any:
    value = told[tag]
    if tag == "$tensor":
        return tensor(str(value), told)
    if tag == "$left_out":
        return live
    if tag == "$nested":
        return _nested(untold(value, None, tensor), live)
    if tag == "$dict":
        now = live if isinstance(live, dict) else {}
        keys = [untold(k, None, tensor) for k, _ in value]
        return {k: untold(v, now.get(k), tensor) for k, (_, v) in zip(keys, value, strict=True)}
    if tag in _SEQUENCES:
        return _SEQUENCES[tag]([untold(v, None, tensor) for v in value], told)
    if tag in _LEAVES:
        return _LEAVES[tag](value, told)
    raise ValueError(f"{tag} has no place in a state")


def _nested(state: Any, live: Any) -> Any:
    if not isinstance(live, Stateful):
        return state
    live.load_state_dict(state)
    return live


def _numbers(value: str, told: dict[str, Any]) -> Any:
    kind = np.dtype(told["dtype"])
    if kind.kind not in _NUMBERS:
        raise ValueError(f"an array of {kind} has no place in a state")
    found = np.frombuffer(base64.b64decode(value), dtype=kind).reshape(told["shape"]).copy()
    return found[()] if told.get("scalar") else found


def _dtype(value: str, told: dict[str, Any]) -> torch.dtype:
    found = getattr(torch, str(value).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{value} is no dtype")
    return found


def _told_numbers(value: np.ndarray, *, scalar: bool) -> dict[str, Any]:
    raw = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
    return {"$array": raw, "dtype": value.dtype.str, "shape": list(value.shape), "scalar": scalar}


_NUMBERS = "biuf"
_TELL: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (bytes | bytearray, lambda v: {"$bytes": base64.b64encode(v).decode()}),
    (complex, lambda v: {"$complex": [v.real, v.imag]}),
    (torch.dtype, lambda v: {"$dtype": str(v)}),
    (torch.device, lambda v: {"$device": str(v)}),
)
_SEQUENCES: dict[str, Callable[[list[Any], dict[str, Any]], Any]] = {
    "$tuple": lambda parts, _: tuple(parts),
    "$set": lambda parts, _: set(parts),
    "$frozenset": lambda parts, _: frozenset(parts),
    "$deque": lambda parts, told: deque(parts, told.get("maxlen")),
}
_LEAVES: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "$float": lambda value, _: float(value),
    "$bytes": lambda value, _: base64.b64decode(value),
    "$complex": lambda value, _: complex(*value),
    "$device": lambda value, _: torch.device(value),
    "$dtype": _dtype,
    "$random": lambda value, _: torch.frombuffer(bytearray(base64.b64decode(value)), dtype=torch.uint8),
    "$array": _numbers,
}
