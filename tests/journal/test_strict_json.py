from __future__ import annotations

import json
import math
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.journal.strict_json import dumps, loads_object
from surefoot.records import Cause, Verdict


def strict(text: str) -> Any:
    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    assert text.isascii()
    assert "\n" not in text
    return json.loads(text, parse_constant=refuse)


class Loop:
    def __init__(self) -> None:
        self.items: list[Any] = [self]


@dataclass
class Pair:
    one: Any
    two: Any


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Odd(Enum):
    SELF = ("a", math.nan)


def endless() -> dict[str, Any]:
    content: dict[str, Any] = {}
    content["again"] = content
    return content


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        (np.float32("inf"), "inf"),
        (np.float64(2.5), 2.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
        (np.array([1.0, math.nan]), [1.0, "nan"]),
        (np.array(7), 7),
        (Verdict.OVERFLOW, 3),
        (Cause.DRIFT, "drift"),
        (Odd.SELF, ["a", "nan"]),
        (Path("a/b"), "a/b"),
        ((1, (2, {3})), [1, [2, [3]]]),
        ({1: "a", None: "b", (1, 2): "c", math.nan: "d"}, {"1": "a", "null": "b", "(1, 2)": "c", "nan": "d"}),
        (Pair(1, math.inf), {"one": 1, "two": "inf"}),
        (b"\x00\xff", "b'\\x00\\xff'"),
        (1 + 2j, "(1+2j)"),
        pytest.param(10**5000, f"<int of {(10**5000).bit_length()} bits>", id="too long to print"),
        (Hostile(), "<Hostile: RuntimeError>"),
        (range(10**9), "range(0, 1000000000)"),
        (np.zeros(5000), "<array (5000,) float64>"),
    ],
)
def test_any_value_becomes_plain_json(value: Any, expected: Any) -> None:
    assert strict(dumps(value)) == expected


@pytest.mark.parametrize(
    "value", [endless(), Loop(), object(), np.datetime64("2020-01-01"), np.longdouble(1), "\ud800"]
)
def test_values_json_cannot_hold_are_still_written(value: Any) -> None:
    strict(dumps({"value": value, "values": [value]}))


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text().filter(lambda s: "n" not in s),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(), values, max_size=4))
def test_json_round_trip_restores_floats(content: dict[str, Any]) -> None:
    text = dumps(content)
    strict(text)
    assert repr(loads_object(text)) == repr(content)


def test_text_that_looks_like_a_float_stays_text() -> None:
    content = {"kind": "nan", "detail": "inf", "values": {"loss": math.inf}}
    assert loads_object(dumps(content)) == content


@pytest.mark.parametrize("line", [b"", b"[1]", b'{"a":', b"\xff\xfe", b"3", pytest.param(b"[" * 100_000, id="deep")])
def test_lines_that_are_not_objects_give_none(line: bytes) -> None:
    assert loads_object(line) is None
