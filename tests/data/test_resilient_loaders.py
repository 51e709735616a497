"""Unreadable samples in a user's dataset, with and without workers and ranks."""

from __future__ import annotations

import re
import sys
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

pytest.importorskip("torchdata")
sys.path.insert(0, str(Path(__file__).parent))
from corpora import opened, write_tokens

from surefoot.data.data_error import DataError


class Flawed(Dataset[int]):
    """Samples equal to their index; some cannot be read."""

    def __init__(self, length: int, bad: set[int]) -> None:
        self._length, self._bad = length, bad

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        if index in self._bad:
            raise OSError(f"disk says no to {index}")
        return index


def read_batches(data: Any, most: int) -> list[list[int]]:
    batches: list[list[int]] = []
    while len(batches) < most:
        batches += [batch.tolist() for batch in islice(data.train_loader, most - len(batches))]
    return batches


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_sample_is_replaced_counted_and_named(workers: int) -> None:
    data = opened("own", dataset=Flawed(40, {7, 20}), held_out=0, workers=workers)
    healthy = opened("own", dataset=Flawed(40, set()), held_out=0)
    flawed, expected = read_batches(data, 10), read_batches(healthy, 10)
    changed = [(a, b) for a, b in zip(chain(*flawed), chain(*expected), strict=True) if a != b]
    assert sorted(b for _, b in changed) == [7, 20]
    assert sorted(map(str, data.unreadable)) == [
        "sample 20: OSError: disk says no to 20",
        "sample 7: OSError: disk says no to 7",
    ]
    assert healthy.unreadable == []


class FailsOnce(Flawed):
    """Fails once for each sample."""

    def __getitem__(self, index: int) -> int:
        if index not in self._bad:
            self._bad.add(index)
            raise TimeoutError("the network is slow today")
        return index


def test_a_transient_os_error_is_retried() -> None:
    data = opened("own", dataset=FailsOnce(40, set()), held_out=0)
    assert sorted(chain(*read_batches(data, 10))) == list(range(40))
    assert data.unreadable == []


def test_replacements_are_the_same_after_a_resume_with_workers_and_other_ranks() -> None:
    dataset = Flawed(48, {3, 11, 30})
    expected = read_batches(opened("own", dataset=dataset, held_out=0), 24)
    first = opened("own", dataset=dataset, held_out=0, workers=2)
    begun = read_batches(first, 5)
    second = opened("own", dataset=dataset, held_out=0)
    second.train_loader.load_state_dict(first.train_loader.state_dict())
    assert begun + read_batches(second, 19) == expected
    by_rank = [
        read_batches(opened("own", dataset=dataset, held_out=0, batch_size=2, rank=r, world=2), 24) for r in range(2)
    ]
    assert [a + b for a, b in zip(*by_rank, strict=True)] == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_too_many_unreadable_samples_stop_the_run_and_are_named(workers: int) -> None:
    data = opened("own", dataset=Flawed(40, set(range(0, 40, 4))), held_out=0, bad_samples=4, workers=workers)
    with pytest.raises(DataError) as caught:
        read_batches(data, 10)
    message = str(caught.value)
    assert re.match("[5-8] samples could not be read, and data.bad_samples allows 4:\n  sample ", message)
    assert "Traceback" not in message


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_is_raised_when_no_sample_can_be_read(workers: int) -> None:
    data = opened("own", dataset=Flawed(40, set(range(40))), held_out=0, workers=workers)
    with pytest.raises(DataError, match=r"no sample could be read(.|\n)*disk says no"):
        next(iter(data.train_loader))


def test_a_token_file_truncated_during_the_run_skips_the_lost_samples(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "a.bin", 801)
    data = opened("tokens", path=path, held_out=0)
    loop = iter(data.train_loader)
    next(loop)
    with path.open("r+b") as file:
        file.truncate(1500)
    assert all(batch["count"] == 32 for batch in loop)
    assert data.unreadable
    assert all("it was cut short since the run began" in sample.reason for sample in data.unreadable)


def test_a_fraction_of_a_user_dataset_is_held_out_by_index() -> None:
    data = opened("own", dataset=Flawed(100, {5}), held_out=0.2)
    assert data.eval_loader is not None
    eval_samples = {sample for batch in data.eval_loader for sample in batch.tolist()}
    train = {sample for batch in data.train_loader for sample in batch.tolist()}
    assert eval_samples | train == set(range(100)) - {5}
    assert len(eval_samples) in (19, 20)
    assert not eval_samples & train
    assert [sample.name for sample in data.unreadable] == ["sample 5"]


def test_user_collate_and_eval_dataset_are_used() -> None:
    data = opened("own", dataset=Flawed(8, set()), held_out_set=Flawed(3, set()), collate=sum)
    assert sum(batch for batch in data.train_loader) == 28
    assert data.eval_loader is not None
    assert list(data.eval_loader) == [3]
    assert data.vocab is data.tokenizer is data.tokens is None


def test_an_iterable_dataset_is_refused() -> None:
    with pytest.raises(DataError, match="expected a dataset with __len__ and __getitem__"):
        opened("own", dataset=iter([1, 2]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="memory is pinned for a device, and there is none")
def test_batches_are_pinned_for_a_device(tmp_path: Path) -> None:
    data = opened("tokens", path=write_tokens(tmp_path / "a.bin"), pin=True)
    batch = next(iter(data.train_loader))
    assert batch["inputs"].is_pinned()
    assert batch["count"] == 32
