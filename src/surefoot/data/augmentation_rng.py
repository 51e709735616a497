"""Random generators that belong to a sample, not to the worker that reads it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from surefoot.data.epoch_order import hash_key
from surefoot.data.sample_sources import source_in

_SAMPLE_KEY = 0x53414D504C45
"""Keeps these keys apart from those of the epoch order."""
_BATCH_KEY = 0x4241544348


def keyed_generator(seed: int, epoch: int, index: int) -> torch.Generator:
    """A torch generator for one sample in one epoch, the same in every process and after every resume.

    The random state inside a loader's workers is never saved. A dataset that draws from this generator returns the same
    sample again whichever worker reads it, and however often the run was stopped::

        def __getitem__(self, index):
            noise = torch.randn(3, generator=keyed_generator(self.seed, self.epoch, index))

    Workers hold a copy of the dataset: an assignment to `self.epoch` only reaches workers started later, so with
    `persistent_workers` pass `augment=` to `make_loader` instead, which sends the epoch along with every sample.
    """
    return torch.Generator().manual_seed(hash_key(seed, epoch, index, _SAMPLE_KEY))


def keyed_numpy(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The same for NumPy."""
    return np.random.Generator(np.random.PCG64(hash_key(seed, epoch, index, _SAMPLE_KEY)))


class AugmentedDataset(Dataset[Any]):
    """A dataset indexed by (epoch, index) that applies `augment` with the generator of that pair."""

    def __init__(self, dataset: Any, augment: Callable[[Any, torch.Generator], Any], seed: int) -> None:
        self._dataset, self._augment, self._seed = dataset, augment, seed

    def __len__(self) -> int:
        return len(self._dataset)

    def source_of(self, index: int) -> str:
        return source_in(self._dataset, index)

    def __getitem__(self, pair: tuple[int, int]) -> Any:
        epoch, index = pair
        return self._augment(self._dataset[index], keyed_generator(self._seed, epoch, index))

    def __getitems__(self, pairs: list[tuple[int, int]]) -> list[Any]:
        _seed_worker(self._seed, pairs)
        return [
            self._augment(sample, keyed_generator(self._seed, epoch, index))
            for sample, (epoch, index) in zip(_read_many(self._dataset, pairs), pairs, strict=True)
        ]


class WorkerSeededDataset(Dataset[Any]):
    """A dataset indexed by (epoch, index) that seeds the global generators of a worker process for each batch.

    Nothing saves those generators; seeded per batch they give the same numbers again whichever worker reads it, and
    however often the run was stopped. In the training process itself nothing is seeded: its generators are saved.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def source_of(self, index: int) -> str:
        return source_in(self._dataset, index)

    def __getitem__(self, pair: tuple[int, int]) -> Any:
        return self.__getitems__([pair])[0]

    def __getitems__(self, pairs: list[tuple[int, int]]) -> list[Any]:
        _seed_worker(self._seed, pairs)
        return _read_many(self._dataset, pairs)


def _read_many(dataset: Any, pairs: list[tuple[int, int]]) -> list[Any]:
    get_many = getattr(dataset, "__getitems__", None)
    return get_many([index for _, index in pairs]) if get_many else [dataset[index] for _, index in pairs]


def _seed_worker(seed: int, pairs: list[tuple[int, int]]) -> None:
    """In a worker process, seed the CPU generators of torch, NumPy and Python by the requested batch."""
    if get_worker_info() is not None and pairs:
        batch_seed = hash_key(seed, *pairs[0], _BATCH_KEY)
        torch.default_generator.manual_seed(batch_seed)
        np.random.seed(batch_seed % (1 << 32))
        random.seed(batch_seed)
