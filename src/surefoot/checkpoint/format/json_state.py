"""Nested state as plain JSON and back, with names where tensors stood; what cannot be told so is left out."""

from __future__ import annotations

import base64
import json
import math
import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from surefoot.checkpoint.tensor_subclasses import Wrapped, known_wrapper
from surefoot.checkpoint.tree import Nested, Stateful

PutTensor = Callable[[str, Any], dict[str, Any] | None]
"""Takes a tensor (or its slot) with the path of its place; what stands for it, or None if it cannot be kept."""
GetTensor = Callable[[str, Mapping[str, Any], Any], Any]
"""The tensor of a name, with what was noted beside it, and what stands in its place now."""

_BARE = (bool, int, float, str, type(None))
_DEEPEST = 64
_LONG = 4096  # bits of a number, beyond which JSON readers give up
_NUMBERS = re.compile(r"[<>|=]([biufcSU])\d{1,6}")


class Plain:
    """Writes one state down."""

    def __init__(self, put: PutTensor, tensor: type) -> None:
        self._put = put
        self._tensor = tensor
        """What stands in the state for a tensor, or is one."""
        self.left_out: list[str] = []
        """Paths of what could not be told in JSON, with its type."""

    def told(self, value: Any, path: str, depth: int = 0) -> Any:
        if depth > _DEEPEST:
            return self._leave(path, value)
        if isinstance(value, self._tensor):
            named = self._put(path, value)
            return self._leave(path, value) if named is None else named
        if type(value) in _BARE:
            return _told_bare(value)
        if isinstance(value, Nested):
            return {"$nested": self.told(value.state, path, depth + 1)}
        if isinstance(value, Wrapped):
            return self._wrapped(value, path, depth + 1)
        return self._container(value, path, depth + 1)

    def _wrapped(self, value: Wrapped, path: str, depth: int) -> Any:
        context = [value.context, list(value.size), list(value.stride)]
        return {
            "$wrapped": {name: self.told(part, f"{path}.{name}", depth) for name, part in value.parts.items()},
            "class": f"{value.kind.__module__}:{value.kind.__qualname__}",
            "context": self.told(context, f"{path}.context", depth),
        }

    def _container(self, value: Any, path: str, depth: int) -> Any:
        if isinstance(value, dict):
            return self._dict(value, path, depth)
        kind = next((name for name, known in _KINDS.items() if isinstance(value, known)), None)
        if kind is None:
            return self._other(value, path)
        parts = [self.told(v, f"{path}.{i}", depth) for i, v in enumerate(value)]
        if kind == "$list":
            return parts
        if kind in ("$set", "$frozenset"):
            parts.sort(key=lambda part: json.dumps(part, sort_keys=True))  # a set has no order to keep
        told: dict[str, Any] = {kind: parts}
        return told | ({"maxlen": value.maxlen} if isinstance(value, deque) else {})

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        plain = all(type(k) is str and not k.startswith("$") for k in value)
        if plain and type(value) in (dict, OrderedDict, defaultdict):
            return {k: self.told(v, f"{path}.{k}", depth) for k, v in value.items()}
        pairs: list[Any] = []
        for i, (key, v) in enumerate(value.items()):
            before = len(self.left_out)
            told = self.told(key, f"{path}.{i}", depth)
            if len(self.left_out) == before:  # what has no key cannot come back
                pairs.append([told, self.told(v, f"{path}.{key if type(key) in (str, int) else i}", depth)])
        return {"$dict": pairs}

    def _other(self, value: Any, path: str) -> Any:
        for known, tell in _TELL:
            if isinstance(value, known):
                return tell(value)
        if isinstance(value, Tensor) and value.dtype is torch.uint8 and value.device.type == "cpu":
            return {"$random": _text(value.numpy().tobytes())}  # of a generator
        if isinstance(value, np.ndarray | np.generic) and _NUMBERS.fullmatch(value.dtype.str):
            return _told_numbers(np.asarray(value), scalar=isinstance(value, np.generic))
        return self._leave(path, value)

    def _leave(self, path: str, value: Any) -> dict[str, Any]:
        self.left_out.append(f"{path} ({type(value).__name__})")
        return {"$left_out": type(value).__name__}


def untold(told: Any, live: Any, tensor: GetTensor) -> Any:
    """What was written down; what was left out then, as it stands in `live` now. Raises nothing but ValueError."""
    try:
        return _Untold(tensor).value(told, live, 0)
    except (TypeError, KeyError, OverflowError, RuntimeError, RecursionError) as error:
        raise ValueError(f"no state: {type(error).__name__}: {error}") from None


class _Untold:
    def __init__(self, tensor: GetTensor) -> None:
        self._tensor = tensor

    def value(self, told: Any, live: Any, depth: int) -> Any:
        if depth > 2 * _DEEPEST + 8:
            raise ValueError("nested too deep to be a state")
        if type(told) in _BARE:
            return told
        if isinstance(told, list):
            now = live if isinstance(live, list) and len(live) == len(told) else [None] * len(told)
            return [self.value(v, was, depth + 1) for v, was in zip(told, now, strict=True)]
        if not isinstance(told, dict):
            raise ValueError(f"a {type(told).__name__} has no place in a state")
        tag = next((k for k in told if k.startswith("$")), None)
        if tag is None:
            now = live if isinstance(live, dict) else {}
            return {k: self.value(v, now.get(k), depth + 1) for k, v in told.items()}
        return self._tagged(tag, told, live, depth + 1)

    def _tagged(self, tag: str, told: dict[str, Any], live: Any, depth: int) -> Any:
        value = told[tag]
        if tag == "$tensor":
            return self._tensor(str(value), told, live)
        if tag == "$left_out":
            return live
        if tag == "$nested":
            state = self.value(value, None, depth)
            return Nested(live, state) if isinstance(live, Stateful) else state
        if tag == "$dict":
            now = live if isinstance(live, dict) else {}
            keys = [self.value(k, None, depth) for k, _ in value]
            return {k: self.value(v, now.get(k), depth) for k, (_, v) in zip(keys, value, strict=True)}
        if tag == "$wrapped":
            return self._wrapped(value, told, depth)
        return self._sequence(tag, told, live, depth) if tag in _KINDS else _leaf(tag, value, told)

    def _wrapped(self, parts: dict[str, Any], told: dict[str, Any], depth: int) -> Any:
        kind = known_wrapper(str(told["class"]))
        context, size, stride = self.value(told["context"], None, depth)
        inner = {name: self.value(part, None, depth) for name, part in parts.items()}
        return kind.__tensor_unflatten__(inner, context, torch.Size(size), tuple(stride))

    def _sequence(self, tag: str, told: dict[str, Any], live: Any, depth: int) -> Any:
        if not isinstance(told[tag], list):
            raise ValueError(f"{tag} holds no parts")
        same = isinstance(live, tuple | deque) and len(live) == len(told[tag])
        parts = [self.value(v, live[i] if same else None, depth) for i, v in enumerate(told[tag])]
        if tag == "$deque":
            return deque(parts, told.get("maxlen"))
        make = getattr(live, "_make", None) if same else None  # of a tuple with names
        if tag == "$tuple" and make is not None:
            return make(parts)
        return _KINDS[tag](parts)


def _leaf(tag: str, value: Any, told: dict[str, Any]) -> Any:
    if tag not in _LEAVES:
        raise ValueError(f"{tag} has no place in a state")
    return _LEAVES[tag](value, told)


def _told_bare(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if type(value) is int and value.bit_length() > _LONG:
        return {"$int": hex(value)}
    return value


def _told_numbers(value: np.ndarray, *, scalar: bool) -> dict[str, Any]:
    raw = _text(np.ascontiguousarray(value).tobytes())
    return {"$array": raw, "dtype": value.dtype.str, "shape": list(value.shape), "scalar": scalar}


def _numbers(value: str, told: dict[str, Any]) -> Any:
    kind = told["dtype"]
    if not isinstance(kind, str) or not _NUMBERS.fullmatch(kind):
        raise ValueError(f"an array of {kind} has no place in a state")
    found = np.ndarray(told["shape"], dtype=np.dtype(kind), buffer=bytearray(_raw(value)))
    return found[()] if told.get("scalar") else found


def _dtype(value: str, told: dict[str, Any]) -> torch.dtype:
    found = getattr(torch, str(value).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{value} is no dtype")
    return found


def _random(value: str, told: dict[str, Any]) -> Tensor:
    return torch.frombuffer(bytearray(_raw(value)), dtype=torch.uint8)


def _text(raw: bytes | bytearray) -> str:
    return base64.b64encode(raw).decode()


def _raw(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_TELL: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (bytearray, lambda v: {"$bytearray": _text(v)}),
    (bytes, lambda v: {"$bytes": _text(v)}),
    (complex, lambda v: {"$complex": [float(v.real).hex(), float(v.imag).hex()]}),
    (torch.dtype, lambda v: {"$dtype": str(v)}),
    (torch.device, lambda v: {"$device": str(v)}),
)
_KINDS: dict[str, Any] = {
    "$list": list,
    "$tuple": tuple,
    "$deque": deque,
    "$set": set,
    "$frozenset": frozenset,
}
_LEAVES: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "$float": lambda value, _: float(value),
    "$int": lambda value, _: int(value, 16),
    "$bytes": lambda value, _: _raw(value),
    "$bytearray": lambda value, _: bytearray(_raw(value)),
    "$complex": lambda value, _: complex(*(float.fromhex(part) for part in value)),
    "$device": lambda value, _: torch.device(value),
    "$dtype": _dtype,
    "$random": _random,
    "$array": _numbers,
}
