"""Nested state as JSON and back, with names in place of tensors; values that JSON cannot express are left out."""

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

from surefoot.checkpoint.tree import NestedState, Stateful, WrapperTensor, find_wrapper_class

PutTensor = Callable[[str, Any], dict[str, Any] | None]
"""Takes the path and a tensor (or its slot); returns what stands for it in JSON, or None if it cannot be saved."""
GetTensor = Callable[[str, Mapping[str, Any], Any], Any]
"""Takes a tensor's name, the JSON object with it, and the live value; returns the tensor."""

_SCALARS = (bool, int, float, str, type(None))
_MAX_DEPTH = 64
_MAX_INT_BITS = 4096  # JSON readers refuse longer integers
_ARRAY_DTYPES = re.compile(r"[<>|=]([biufcSU])\d{1,6}")


class JsonEncoder:
    """Encodes states as JSON values."""

    def __init__(self, put: PutTensor, tensor: type) -> None:
        self._put = put
        self._tensor = tensor
        """The type of tensors in the state: Tensor, or TensorSlot."""
        self.left_out: list[str] = []
        """Path and type of each value that JSON cannot express."""

    def encode(self, value: Any, path: str, depth: int = 0) -> Any:
        if depth > _MAX_DEPTH:
            return self._leave_out(path, value)
        if isinstance(value, self._tensor):
            reference = self._put(path, value)
            return self._leave_out(path, value) if reference is None else reference
        if type(value) in _SCALARS:
            return _encode_scalar(value)
        if isinstance(value, NestedState):
            return {"$nested": self.encode(value.state, path, depth + 1)}
        if isinstance(value, WrapperTensor):
            return self._wrapper(value, path, depth + 1)
        return self._container(value, path, depth + 1)

    def _wrapper(self, value: WrapperTensor, path: str, depth: int) -> Any:
        context = [value.context, list(value.size), list(value.stride)]
        return {
            "$wrapped": {name: self.encode(part, f"{path}.{name}", depth) for name, part in value.parts.items()},
            "class": f"{value.cls.__module__}:{value.cls.__qualname__}",
            "context": self.encode(context, f"{path}.context", depth),
        }

    def _container(self, value: Any, path: str, depth: int) -> Any:
        if isinstance(value, dict):
            return self._dict(value, path, depth)
        tag = next((tag for tag, cls in _SEQUENCES.items() if isinstance(value, cls)), None)
        if tag is None:
            return self._leaf(value, path)
        parts = [self.encode(v, f"{path}.{i}", depth) for i, v in enumerate(value)]
        if tag == "$list":
            return parts
        if tag in ("$set", "$frozenset"):
            parts.sort(key=lambda part: json.dumps(part, sort_keys=True))  # deterministic: a set has no order
        encoded: dict[str, Any] = {tag: parts}
        return encoded | ({"maxlen": value.maxlen} if isinstance(value, deque) else {})

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        plain = all(type(k) is str and not k.startswith("$") for k in value)
        if plain and type(value) in (dict, OrderedDict, defaultdict):
            return {k: self.encode(v, f"{path}.{k}", depth) for k, v in value.items()}
        pairs: list[Any] = []
        for i, (key, v) in enumerate(value.items()):
            before = len(self.left_out)
            encoded = self.encode(key, f"{path}.{i}", depth)
            if len(self.left_out) == before:  # a value without its key cannot be restored
                pairs.append([encoded, self.encode(v, f"{path}.{key if type(key) in (str, int) else i}", depth)])
        return {"$dict": pairs}

    def _leaf(self, value: Any, path: str) -> Any:
        for cls, encode in _LEAF_ENCODERS:
            if isinstance(value, cls):
                return encode(value)
        if isinstance(value, Tensor) and value.dtype is torch.uint8 and value.device.type == "cpu":
            return {"$random": _to_base64(value.numpy().tobytes())}  # the state of a generator
        if isinstance(value, np.ndarray | np.generic) and _ARRAY_DTYPES.fullmatch(value.dtype.str):
            return _encode_array(np.asarray(value), scalar=isinstance(value, np.generic))
        return self._leave_out(path, value)

    def _leave_out(self, path: str, value: Any) -> dict[str, Any]:
        self.left_out.append(f"{path} ({type(value).__name__})")
        return {"$left_out": type(value).__name__}


def decode(encoded: Any, live: Any, tensor: GetTensor) -> Any:
    """The encoded value; what was left out keeps its value in `live`. Raises nothing but ValueError."""
    try:
        return _JsonDecoder(tensor).value(encoded, live, 0)
    except (TypeError, KeyError, OverflowError, RuntimeError, RecursionError) as error:
        raise ValueError(f"not a state: {type(error).__name__}: {error}") from None


class _JsonDecoder:
    def __init__(self, tensor: GetTensor) -> None:
        self._tensor = tensor

    def value(self, encoded: Any, live: Any, depth: int) -> Any:
        if depth > 2 * _MAX_DEPTH + 8:
            raise ValueError("nested too deeply to be a state")
        if type(encoded) in _SCALARS:
            return encoded
        if isinstance(encoded, list):
            current = live if isinstance(live, list) and len(live) == len(encoded) else [None] * len(encoded)
            return [self.value(v, now, depth + 1) for v, now in zip(encoded, current, strict=True)]
        if not isinstance(encoded, dict):
            raise ValueError(f"a {type(encoded).__name__} is not allowed in a state")
        tag = next((k for k in encoded if k.startswith("$")), None)
        if tag is None:
            current = live if isinstance(live, dict) else {}
            return {k: self.value(v, current.get(k), depth + 1) for k, v in encoded.items()}
        return self._tagged(tag, encoded, live, depth + 1)

    def _tagged(self, tag: str, encoded: dict[str, Any], live: Any, depth: int) -> Any:
        value = encoded[tag]
        if tag == "$tensor":
            return self._tensor(str(value), encoded, live)
        if tag == "$left_out":
            return live
        if tag == "$nested":
            state = self.value(value, None, depth)
            return NestedState(live, state) if isinstance(live, Stateful) else state
        if tag == "$dict":
            current = live if isinstance(live, dict) else {}
            keys = [self.value(k, None, depth) for k, _ in value]
            return {k: self.value(v, current.get(k), depth) for k, (_, v) in zip(keys, value, strict=True)}
        if tag == "$wrapped":
            return self._wrapper(value, encoded, depth)
        return self._sequence(tag, encoded, live, depth) if tag in _SEQUENCES else _decode_leaf(tag, value, encoded)

    def _wrapper(self, parts: dict[str, Any], encoded: dict[str, Any], depth: int) -> Any:
        cls = find_wrapper_class(str(encoded["class"]))
        context, size, stride = self.value(encoded["context"], None, depth)
        inner = {name: self.value(part, None, depth) for name, part in parts.items()}
        return cls.__tensor_unflatten__(inner, context, torch.Size(size), tuple(stride))

    def _sequence(self, tag: str, encoded: dict[str, Any], live: Any, depth: int) -> Any:
        if not isinstance(encoded[tag], list):
            raise ValueError(f"{tag} is not a list")
        same = isinstance(live, tuple | deque) and len(live) == len(encoded[tag])
        parts = [self.value(v, live[i] if same else None, depth) for i, v in enumerate(encoded[tag])]
        if tag == "$deque":
            return deque(parts, encoded.get("maxlen"))
        make = getattr(live, "_make", None) if same else None  # of a named tuple
        if tag == "$tuple" and make is not None:
            return make(parts)
        return _SEQUENCES[tag](parts)


def _decode_leaf(tag: str, value: Any, encoded: dict[str, Any]) -> Any:
    if tag not in _LEAF_DECODERS:
        raise ValueError(f"{tag} is not allowed in a state")
    return _LEAF_DECODERS[tag](value, encoded)


def _encode_scalar(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if type(value) is int and value.bit_length() > _MAX_INT_BITS:
        return {"$int": hex(value)}
    return value


def _encode_array(value: np.ndarray, *, scalar: bool) -> dict[str, Any]:
    data = _to_base64(np.ascontiguousarray(value).tobytes())
    return {"$array": data, "dtype": value.dtype.str, "shape": list(value.shape), "scalar": scalar}


def _decode_array(value: str, encoded: dict[str, Any]) -> Any:
    dtype = encoded["dtype"]
    if not isinstance(dtype, str) or not _ARRAY_DTYPES.fullmatch(dtype):
        raise ValueError(f"an array of {dtype} is not allowed in a state")
    array = np.ndarray(encoded["shape"], dtype=np.dtype(dtype), buffer=bytearray(_from_base64(value)))
    return array[()] if encoded.get("scalar") else array


def _decode_dtype(value: str, encoded: dict[str, Any]) -> torch.dtype:
    dtype = getattr(torch, str(value).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{value} is not a dtype")
    return dtype


def _decode_rng(value: str, encoded: dict[str, Any]) -> Tensor:
    return torch.frombuffer(bytearray(_from_base64(value)), dtype=torch.uint8)


def _to_base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_LEAF_ENCODERS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (bytearray, lambda v: {"$bytearray": _to_base64(v)}),
    (bytes, lambda v: {"$bytes": _to_base64(v)}),
    (complex, lambda v: {"$complex": [float(v.real).hex(), float(v.imag).hex()]}),
    (torch.dtype, lambda v: {"$dtype": str(v)}),
    (torch.device, lambda v: {"$device": str(v)}),
)
_SEQUENCES: dict[str, Any] = {
    "$list": list,
    "$tuple": tuple,
    "$deque": deque,
    "$set": set,
    "$frozenset": frozenset,
}
_LEAF_DECODERS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "$float": lambda value, _: float(value),
    "$int": lambda value, _: int(value, 16),
    "$bytes": lambda value, _: _from_base64(value),
    "$bytearray": lambda value, _: bytearray(_from_base64(value)),
    "$complex": lambda value, _: complex(*(float.fromhex(part) for part in value)),
    "$device": lambda value, _: torch.device(value),
    "$dtype": _decode_dtype,
    "$random": _decode_rng,
    "$array": _decode_array,
}
