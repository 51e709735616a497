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


def test_batch_is_copied_into_plain_containers() -> None:
    x = torch.ones(3, 2)
    copied = copy_batch(OrderedDict(a=UserDict(x=x), b=Pair(x, x), c=["text", 3, None]))
    x.zero_()
    assert copied["a"]["x"].sum() == 6
    assert type(copied["a"]) is dict
    assert type(copied["b"]) is tuple
    assert copied["c"] == ["text", 3, None]


def test_first_samples_of_a_large_batch_are_copied() -> None:
    batch = {"x": torch.arange(80.0).reshape(10, 8), "y": torch.arange(10.0), "names": list("abcdefghij")}
    copied = copy_batch(batch, max_bytes=150)
    assert [len(copied[name]) for name in ("x", "y", "names")] == [4, 4, 4]
    assert torch.equal(copied["x"], batch["x"][:4])


def test_batch_that_cannot_be_copied_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be cut into samples"):
        copy_batch([torch.ones(4), torch.ones(5)], max_bytes=8)
    with pytest.raises(TypeError, match="a object inside the batch"):
        copy_batch({"x": object()})
    with pytest.raises(TypeError, match="sparse"):
        copy_batch(torch.eye(3).to_sparse())
