"""Any nested value as JSON: it is decoded equal or listed as left out; garbage raises ValueError and runs nothing."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.checkpoint.format.json_state import JsonEncoder, decode
from surefoot.checkpoint.tree import TensorSlot

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers()
    | st.sampled_from([torch.float32, torch.device("cpu"), torch.device("cuda", 3), np.float32(1.5), np.int8(-3)])
)
KEYS = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text()) | st.binary()
VALUES = st.recursive(
    LEAVES,
    lambda inside: (
        st.lists(inside)
        | st.lists(inside).map(tuple)
        | st.lists(inside).map(lambda parts: deque(parts, maxlen=9))
        | st.dictionaries(KEYS, inside)
        | st.frozensets(KEYS)
        | st.sets(KEYS)
    ),
    max_leaves=25,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inside: (
        st.lists(inside, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                [
                    "$tuple",
                    "$dict",
                    "$float",
                    "$bytes",
                    "$array",
                    "$deque",
                    "$set",
                    "$complex",
                    "$dtype",
                    "$device",
                    "$random",
                    "$nested",
                    "$left_out",
                    "$int",
                    "$list",
                    "$frozenset",
                    "$bytearray",
                    "$tensor",
                    "$eval",
                    "dtype",
                    "shape",
                    "scalar",
                    "maxlen",
                    "a",
                ]
            ),
            inside | st.sampled_from(["AAAA", "<f4", "|O", "<M8[s]", "float32", "load", "cpu", "__class__"]),
            max_size=4,
        )
    ),
    max_leaves=20,
)


def encode(value: Any) -> tuple[Any, list[str]]:
    encoder = JsonEncoder(lambda path, value: None, TensorSlot)
    encoded = encoder.encode(value, "it")
    return json.loads(json.dumps(encoded, allow_nan=False)), encoder.left_out


def get_tensor(name: str, how: Any, live: Any) -> str:
    return name


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return len(a) == len(b) and all(type(j) is type(k) and j == k and alike(a[j], b[k]) for j, k in zip(a, b))  # noqa: B905
    if isinstance(a, list | tuple | deque):
        return type(a) is type(b) and len(a) == len(b) and all(map(alike, a, b))
    if isinstance(a, float | complex):
        return repr(a) == repr(b)
    return type(a) is type(b) and a == b


@settings(max_examples=200)
@given(VALUES)
def test_any_value_round_trips(value: Any) -> None:
    encoded, left_out = encode(value)
    assert left_out == []
    assert alike(value, decode(encoded, None, get_tensor))


@settings(max_examples=300)
@given(JSON)
def test_garbage_decodes_or_raises_value_error(garbage: Any) -> None:
    with contextlib.suppress(ValueError):
        decode(garbage, None, get_tensor)


@pytest.mark.parametrize(
    "value",
    [object(), print, np.array([object()]), np.datetime64("2020-01-01"), type, {1: print}, [{"a": (object,)}]],
    ids=lambda value: type(value).__name__,
)
def test_values_that_cannot_be_encoded_are_listed(value: Any) -> None:
    _, left_out = encode(value)
    assert len(left_out) == 1
    assert left_out[0].startswith("it")


def test_left_out_values_keep_the_live_value() -> None:
    encoded, _ = encode({"call": print, "n": 1, "in": (1, print)})
    assert decode(encoded, {"call": repr, "n": 2, "in": (5, repr)}, get_tensor) == {
        "call": repr,
        "n": 1,
        "in": (1, repr),
    }


def test_infinite_nesting_is_left_out_and_refused() -> None:
    deep: list[Any] = []
    deep.append(deep)
    encoded, left_out = encode(deep)
    assert len(left_out) == 1
    decode(encoded, None, get_tensor)
    garbage: Any = 1
    for _ in range(5000):
        garbage = [garbage]
    with pytest.raises(ValueError, match="too deep"):
        decode(garbage, None, get_tensor)


def test_subclasses_of_str_and_int_are_left_out() -> None:
    class SubStr(str):
        __slots__ = ()

    class SubInt(int):
        pass

    for value in (SubStr("a"), SubInt(3)):
        assert encode(value)[1]


@pytest.mark.parametrize("kind", ["O", "|O8", "V8", "<M8[s]", "f4,f4", ["a", "O"], None, {"names": ["a"]}])
def test_object_arrays_are_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match="not allowed"):
        decode({"$array": "AAAAAAAAAAA=", "dtype": kind, "shape": [1]}, None, get_tensor)
