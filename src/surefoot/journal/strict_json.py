"""Strictly valid JSON for any Python value, and the way back for the floats that JSON cannot hold."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np

_DEEPEST = 12
_LONGEST_REPR = 500
_LARGEST_ARRAY = 4096
_LONGEST_LIST = 100_000
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_TEXT = frozenset({"kind", "name", "detail", "reason", "action", "detector", "cause", "pattern"})


def dumps(value: Any) -> str:
    """One line of ASCII that any JSON parser accepts, whatever `value` is."""
    return json.dumps(plain(value), allow_nan=False, separators=(",", ":"))


def plain(value: Any, depth: int = 0) -> Any:
    """The same value in nothing but dict, list, str, int, finite float, bool and None; never raises."""
    try:
        return _plain(value, depth)
    except Exception as error:  # a hostile __iter__, __len__ or property: the journal must outlive it
        return f"<{type(value).__name__}: {type(error).__name__}>"


def _plain(value: Any, depth: int) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, np.generic):
        return _plain_scalar(value, depth)
    if isinstance(value, str | PurePath) and not isinstance(value, Enum):
        return str.__str__(value) if isinstance(value, str) else str(value)
    if isinstance(value, int | float) and not isinstance(value, Enum):
        return _plain_number(value)
    return _plain_container(value, depth + 1) if depth < _DEEPEST else _repr(value)


def _plain_scalar(value: np.generic, depth: int) -> Any:
    # A long double gives itself back from item(): it is told in words.
    item = value.item()
    return _repr(value) if isinstance(item, np.generic) else plain(item, depth)


def _plain_number(value: float) -> Any:
    if isinstance(value, int):
        # Python refuses to print integers of thousands of digits.
        return int(value) if value.bit_length() < 1024 else f"<int of {value.bit_length()} bits>"
    return float(value) if math.isfinite(value) else str(float(value))


def _plain_container(value: Any, depth: int) -> Any:
    if isinstance(value, Enum):
        return plain(value.value, depth)
    if isinstance(value, np.ndarray):
        return plain(value.tolist(), depth) if value.size <= _LARGEST_ARRAY else f"<array {value.shape} {value.dtype}>"
    if isinstance(value, Mapping):
        return {_key(key): plain(item, depth) for key, item in list(value.items())}
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name), depth) for f in fields(value)}
    if isinstance(value, bytes | bytearray | memoryview) or not isinstance(value, Sequence | Set):
        return _repr(value)
    return [plain(item, depth) for item in list(value)] if len(value) <= _LONGEST_LIST else _repr(value)


def _key(key: Any) -> str:
    value = plain(key, _DEEPEST)
    return value if isinstance(value, str) else json.dumps(value)


def _repr(value: Any) -> str:
    words = repr(value)
    return words if len(words) <= _LONGEST_REPR else words[:_LONGEST_REPR] + "..."


def loads_object(line: bytes | str) -> dict[str, Any] | None:
    """The JSON object in `line` with its non-finite floats restored, or None if there is none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    return {key: item if key in _TEXT and isinstance(item, str) else _restored(item) for key, item in value.items()}


def _restored(value: Any) -> Any:
    if isinstance(value, str):
        return _FLOATS.get(value, value)
    if isinstance(value, list):
        return [_restored(item) for item in value]
    if isinstance(value, dict):
        return {key: _restored(item) for key, item in value.items()}
    return value
