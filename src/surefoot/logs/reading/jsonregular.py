"""JSON lines that all have the same names and nothing but numbers, as most long logs: read without an object each."""

from __future__ import annotations

import json
import re

import numpy as np
from numpy.typing import NDArray

_NAME = re.compile(rb'[{,]\s*"(?:[^"\\]|\\.)*"\s*:')
_MOST = 64
_FIRST = 0x80
"""Bytes from here on stand for the names: they cannot occur in ASCII."""
_IN_NUMBERS = b"0123456789+-.eE \r" + b"NaInfity"


def parse_number_matrix(raw: bytes) -> tuple[list[str], NDArray[np.float64]] | None:
    """Names and values of a block of lines; None where a single line is not like the first.

    Every name is replaced by one byte; what is left when the numbers are taken away has to be the same for every line.
    """
    first = raw[: raw.find(b"\n")]
    names = _names(first) if raw.endswith(b"\n") and raw.isascii() else None
    signs = _NAME.findall(first)
    if not names or len(names) != len(signs) or len(names) > _MOST:
        return None
    text = raw
    for index, sign in enumerate(signs):
        text = text.replace(sign, bytes([_FIRST + index]))
    marks = bytes(range(_FIRST, _FIRST + len(names)))
    if text.translate(None, _IN_NUMBERS) != (marks + b"}\n") * raw.count(b"\n"):
        return None
    plain = text.translate(bytes.maketrans(marks + b"}\r", b" " + b"," * (len(names) - 1) + b"  "))
    try:
        values = np.loadtxt(plain.decode("ascii").splitlines(), delimiter=",", comments=None, ndmin=2)
    except ValueError:
        return None
    return (names, values) if values.shape == (raw.count(b"\n"), len(names)) else None


def _names(line: bytes) -> list[str] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not {type(value) for value in record.values()} <= {int, float}:
        return None
    names = [name.strip() for name in record]
    return names if len(set(names)) == len(names) and "train_runtime" not in names else None
