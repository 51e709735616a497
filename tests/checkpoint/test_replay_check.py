"""Which part of a batch is saved for the replay check."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from typing import NamedTuple

import pytest
import torch

from surefoot.checkpoint.replay_check import copy_batch


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


def test_a_batch_is_copied_into_plain_containers() -> None:
    x = torch.ones(3, 2)
    found = copy_batch(OrderedDict(a=UserDict(x=x), b=Pair(x, x), c=["text", 3, None]))
    x.zero_()
    assert found["a"]["x"].sum() == 6
    assert type(found["a"]) is dict
    assert type(found["b"]) is tuple
    assert found["c"] == ["text", 3, None]


def test_of_a_large_batch_the_first_samples_are_kept() -> None:
    batch = {"x": torch.arange(80.0).reshape(10, 8), "y": torch.arange(10.0), "names": list("abcdefghij")}
    found = copy_batch(batch, max_bytes=150)
    assert [len(found[name]) for name in ("x", "y", "names")] == [4, 4, 4]
    assert torch.equal(found["x"], batch["x"][:4])


def test_what_cannot_be_kept_is_named() -> None:
    with pytest.raises(ValueError, match="cannot be cut into samples"):
        copy_batch([torch.ones(4), torch.ones(5)], max_bytes=8)
    with pytest.raises(TypeError, match="a object inside the batch"):
        copy_batch({"x": object()})
    with pytest.raises(TypeError, match="sparse"):
        copy_batch(torch.eye(3).to_sparse())
