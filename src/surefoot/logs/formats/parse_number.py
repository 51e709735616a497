"""Parses numbers as logs write them."""

from __future__ import annotations

import re

_MISSING = frozenset({"", "-", "--", "none", "null", "n/a", "na", "nil", "?", "undefined", "<na>", "nat", "."})
_NAN = re.compile(r"[+-]?(?:nan(?:\(\w*\))?|1\.?#(?:qnan|snan|ind)\w*)", re.I)
_INFINITE = re.compile(r"([+-]?)(?:inf(?:inity)?|∞|1\.?#inf\w*)", re.I)
_WRAPPED = re.compile(
    r"(?:tensor|array|np\.\w+|numpy\.\w+|float|jnp\.\w+)?[(\[]+\s*([^\s,()\[\]]+)\s*(?:,[^()]*)?[)\]]+"
)
_UNITS = re.compile(
    r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*"
    r"(%|[kKMGBT]|[num\u00b5]?s|secs?|min|hr?|x|[KMGT]i?B|B|(?:it|its|tok|tokens|steps?|samples|img|imgs)/s(?:ec)?|s/(?:it|step))"
)
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_FRACTION = re.compile(r"(\d+)\s*/\s*\d+")
"""3/300: a counter and its total."""
_SCALES = {"k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}


def is_missing(text: str) -> bool:
    """Whether a cell means "no value": empty, None, null, N/A; NaN is a value."""
    return text.strip().lower() in _MISSING


def parse_number(text: str, *, comma: bool = False) -> float | None:
    """The number in a cell, or None for a missing value, a name, a date.

    `comma` says that the file uses decimal commas.
    """
    if ":" in text and "(" not in text:
        return None  # a time or a path; rejected early because logs are full of them
    if comma and "," in text:
        text = text.replace(".", "").replace(",", ".")
    try:
        return float(text)
    except ValueError:
        pass
    text = text.strip().strip("\"'").strip()
    return None if len(text) > 200 or text.lower() in _MISSING else _parse_unusual(text)


def _parse_unusual(text: str) -> float | None:
    """Numbers in unusual notations: 1.2K, 95 %, 3/300, tensor(0.5), -nan(ind), 1,234,567."""
    if match := _UNITS.fullmatch(text):
        return float(match[1]) * _SCALES.get(match[2], 1.0)
    if _THOUSANDS.fullmatch(text):
        return float(text.replace(",", ""))
    if _NAN.fullmatch(text):
        return float("nan")
    if match := _INFINITE.fullmatch(text):
        return float(match[1] + "inf")
    match = _FRACTION.fullmatch(text) or _WRAPPED.fullmatch(text)
    return _parse_float(match[1] if match else text)


def _parse_float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
