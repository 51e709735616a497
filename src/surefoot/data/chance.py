"""Random numbers that belong to a sample and not to the process that reads it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from surefoot.data.order import hash_key

_SAMPLE = 0x53414D504C45
"""Keeps these keys apart from those of the order."""
_BATCH = 0x4241544348


def keyed_generator(seed: int, epoch: int, index: int) -> torch.Generator:
    """A torch generator for one sample in one epoch, the same in every process and after every resume.

    The state of random generators inside a loader's workers is saved by nobody. A dataset that draws from this one
    gives the same sample again whichever worker reads it, and however often the run was stopped::

        def __getitem__(self, index):
            noise = torch.randn(3, generator=keyed_generator(self.seed, self.epoch, index))

    Workers hold a copy of the dataset: `self.epoch` set outside reaches only those that are started later, so with
    `persistent_workers` pass `augment=` to `make_loader` instead, which sends the epoch along with every sample.
    """
    return torch.Generator().manual_seed(hash_key(seed, epoch, index, _SAMPLE))


def keyed_numpy(seed: int, epoch: int, index: int) -> np.random.Generator:
    """The same for NumPy."""
    return np.random.Generator(np.random.PCG64(hash_key(seed, epoch, index, _SAMPLE)))


class AugmentedDataset(Dataset[Any]):
    """A dataset asked by (epoch, index), every sample changed by `augment` with the generator of that pair."""

    def __init__(self, dataset: Any, augment: Callable[[Any, torch.Generator], Any], seed: int) -> None:
        self._dataset, self._augment, self._seed = dataset, augment, seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, asked: tuple[int, int]) -> Any:
        epoch, index = asked
        return self._augment(self._dataset[index], keyed_generator(self._seed, epoch, index))

    def __getitems__(self, asked: list[tuple[int, int]]) -> list[Any]:
        _seed_worker(self._seed, asked)
        many = getattr(self._dataset, "__getitems__", None)
        samples = many([index for _, index in asked]) if many else [self._dataset[index] for _, index in asked]
        return [
            self._augment(sample, keyed_generator(self._seed, epoch, index))
            for sample, (epoch, index) in zip(samples, asked, strict=True)
        ]


class WorkerSeededDataset(Dataset[Any]):
    """A dataset asked by (epoch, index) that seeds the global generators of a worker process for each batch.

    Nobody saves those generators; seeded by the batch they give the same numbers again whichever worker reads it, and
    however often the run was stopped. In the training process itself nothing is seeded: there they are saved.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __getitem__(self, asked: tuple[int, int]) -> Any:
        return self.__getitems__([asked])[0]

    def __getitems__(self, asked: list[tuple[int, int]]) -> list[Any]:
        _seed_worker(self._seed, asked)
        many = getattr(self._dataset, "__getitems__", None)
        return many([index for _, index in asked]) if many else [self._dataset[index] for _, index in asked]


def _seed_worker(seed: int, asked: list[tuple[int, int]]) -> None:
    """In a worker process, seed torch's generator on the host, NumPy's and Python's by the batch that is asked for."""
    if get_worker_info() is not None and asked:
        drawn = hash_key(seed, *asked[0], _BATCH)
        torch.default_generator.manual_seed(drawn)
        np.random.seed(drawn % (1 << 32))
        random.seed(drawn)
