"""Batches in smaller pieces: the same samples in the same order, each with its own count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from surefoot.train.split_batch import CannotSplit, split_batch


def pieces(batch: Any, size: int, **options: Any) -> list[Any]:
    return [piece.batch for piece in split_batch(batch, size, **options)]


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Sample:
    x: Tensor
    names: list[str]


X = torch.arange(10.0).reshape(5, 2)
Y = torch.arange(5)


def test_tensors_keep_their_order_and_their_memory() -> None:
    parts = pieces((X, Y), 2)
    assert [len(x) for x, _ in parts] == [2, 2, 1]
    assert torch.cat([x for x, _ in parts]).equal(X)
    assert torch.cat([y for _, y in parts]).equal(Y)
    assert parts[0][0].data_ptr() == X.data_ptr()


def test_all_containers_are_split() -> None:
    assert [p.y.tolist() for p in pieces(Pair(X, Y), 3)] == [[0, 1, 2], [3, 4]]
    assert [p.names for p in pieces(Sample(X, list("abcde")), 3)] == [["a", "b", "c"], ["d", "e"]]
    nested = {"inputs": {"x": X, "scale": torch.tensor(2.0)}, "ids": list(range(5)), "name": "batch"}
    first, second = pieces(nested, 4)
    assert (len(first["inputs"]["x"]), second["ids"], second["name"]) == (4, [4], "batch")
    assert first["inputs"]["scale"] == 2
    assert len(nested["ids"]) == 5  # the batch itself is as it was


def test_shares_are_of_samples_without_a_count() -> None:
    assert [piece.share for piece in split_batch((X, Y), 2)] == [0.4, 0.4, 0.2]


def test_each_piece_counts_its_own_targets() -> None:
    targets = torch.tensor([[1, 2, 3], [4, -100, -100], [5, 6, -100]])
    batch = {"inputs": targets.clamp(min=0), "targets": targets, "count": 6}
    split = split_batch(batch, 1)
    assert [piece.batch["count"] for piece in split] == [3, 1, 2]
    assert [piece.share for piece in split] == [3 / 6, 1 / 6, 2 / 6]
    assert batch["count"] == 6


@pytest.mark.parametrize(
    ("batch", "counts"),
    [
        ({"x": X, "count": 5}, [2, 2, 1]),
        ({"x": X, "count": torch.tensor(5)}, [2, 2, 1]),
        ({"x": X, "count": torch.tensor([3, 1, 4, 1, 5])}, [4, 5, 5]),
        ({"x": X, "mask": torch.tensor([[1, 1], [1, 0], [0, 0], [1, 1], [1, 0]]), "count": 6}, [3, 2, 1]),
    ],
    ids=["samples", "tensor", "per sample", "mask"],
)
def test_counts_of_other_kinds(batch: dict[str, Any], counts: list[int]) -> None:
    assert [int(torch.as_tensor(part["count"]).sum()) for part in pieces(batch, 2)] == counts


def test_a_rest_too_small_for_batch_norm_stays_with_its_neighbour() -> None:
    assert [len(part) for part in pieces(X, 2, at_least=2)] == [2, 3]
    assert [len(part) for part in pieces(X[:1], 2, at_least=2)] == [1]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((X, torch.ones(3)), "holds a tensor of shape 3"),
        ({"x": X, "count": 17}, 'the "count" of a batch is 17'),
        ("text", "the first tensor of a batch has 0 rows"),
        (torch.ones(100), "the first tensor of a batch has 100 rows, and batch.size is 8"),
    ],
)
def test_unknown_batches_are_refused(batch: Any, message: str) -> None:
    with pytest.raises(CannotSplit, match=message):
        split_batch(batch, 2, largest=8)


def test_a_whole_batch_is_one_piece() -> None:
    (piece,) = split_batch(Y, 8)
    assert piece.share == 1.0
    assert piece.batch.equal(Y)
