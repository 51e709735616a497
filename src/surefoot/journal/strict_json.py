"""Strictly valid JSON for any Python value, and a parser that restores the floats JSON cannot represent."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np

_MAX_DEPTH = 12
_MAX_REPR = 500
_MAX_ARRAY = 4096
_MAX_LIST = 100_000
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_TEXT_KEYS = frozenset({"kind", "name", "detail", "reason", "action", "detector", "cause", "pattern"})
"""Keys whose values are always text: a detail of "nan" stays a string."""


def dumps(value: Any) -> str:
    """One line of ASCII that any JSON parser accepts, whatever `value` is."""
    return json.dumps(plain(value), allow_nan=False, separators=(",", ":"))


def plain(value: Any, depth: int = 0) -> Any:
    """The value as dict, list, str, int, finite float, bool and None only; never raises."""
    try:
        return _plain(value, depth)
    except Exception as error:  # an __iter__, __len__ or property that raises must not stop the journal
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
    return _plain_container(value, depth + 1) if depth < _MAX_DEPTH else _repr(value)


def _plain_scalar(value: np.generic, depth: int) -> Any:
    # item() of a long double returns a long double again: use its repr.
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
        return plain(value.tolist(), depth) if value.size <= _MAX_ARRAY else f"<array {value.shape} {value.dtype}>"
    if isinstance(value, Mapping):
        return {_key(key): plain(item, depth) for key, item in list(value.items())}
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name), depth) for f in fields(value)}
    if isinstance(value, bytes | bytearray | memoryview) or not isinstance(value, Sequence | Set):
        return _repr(value)
    return [plain(item, depth) for item in list(value)] if len(value) <= _MAX_LIST else _repr(value)


def _key(key: Any) -> str:
    value = plain(key, _MAX_DEPTH)
    return value if isinstance(value, str) else json.dumps(value)


def _repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_REPR else text[:_MAX_REPR] + "..."


def loads_object(line: bytes | str) -> dict[str, Any] | None:
    """The JSON object in `line` with its non-finite floats restored, or None if it does not parse as one."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    return {
        key: item if key in _TEXT_KEYS and isinstance(item, str) else _restore_floats(item)
        for key, item in value.items()
    }


def _restore_floats(value: Any) -> Any:
    if isinstance(value, str):
        return _FLOATS.get(value, value)
    if isinstance(value, list):
        return [_restore_floats(item) for item in value]
    if isinstance(value, dict):
        return {key: _restore_floats(item) for key, item in value.items()}
    return value
