"""Skipping batches that were already read, for loaders without a state."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler

from surefoot.data import Sampler, skip_ahead


class Counting(Dataset[int]):
    def __init__(self) -> None:
        self.fetched: list[int] = []

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> int:
        self.fetched.append(index)
        return index


def loader_of(kind: str, data: Dataset[int]) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    samplers: dict[str, Any] = {
        "in order": None,
        "shuffled": RandomSampler(Counting(), generator=generator),
        "distributed": DistributedSampler(Counting(), 2, 1, seed=4),
    }
    return DataLoader(data, batch_size=4, sampler=samplers[kind])


@pytest.mark.parametrize("kind", ["in order", "shuffled", "distributed"])
def test_skipped_batches_are_not_read(kind: str) -> None:
    expected = [batch.tolist() for batch in loader_of(kind, Counting())]
    for n in (0, 1, len(expected), len(expected) + 1):
        data = Counting()
        remaining = [batch.tolist() for batch in skip_ahead(loader_of(kind, data), n)]
        assert remaining == expected[n:]
        assert data.fetched == [sample for batch in remaining for sample in batch]


def test_the_loader_itself_is_unchanged() -> None:
    loader = loader_of("in order", Counting())
    assert len(list(skip_ahead(loader, 4))) == 2
    assert len(list(loader)) == 6


def test_one_sample_at_a_time_and_other_iterables() -> None:
    assert list(skip_ahead(DataLoader(Counting(), batch_size=None), 20)) == [20, 21, 22]
    assert list(skip_ahead([1, 2, 3], 2)) == [3]


def test_skip_ahead_refuses_a_loader_whose_order_would_change() -> None:
    with pytest.raises(ValueError, match="in another order"):
        skip_ahead(DataLoader(Counting(), batch_size=4, shuffle=True), 3)
    with pytest.raises(TypeError, match="its own position"):
        skip_ahead(Sampler(23, 4, seed=0), 3)
    with pytest.raises(ValueError, match="number of batches"):
        skip_ahead([1, 2], -1)
