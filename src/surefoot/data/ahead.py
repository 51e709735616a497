"""For loaders that keep no position: the rest of an epoch, counted from its beginning."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from torch.utils.data import DataLoader, IterableDataset, RandomSampler

Batch = TypeVar("Batch")


def skip_ahead(loader: Iterable[Batch], n: int) -> Iterator[Batch]:
    """One loop over `loader` without its first `n` batches, for the epoch in which a run was stopped.

    It is only right when the epoch comes in the same order again: no shuffling, a DistributedSampler after the same
    `set_epoch`, or a RandomSampler whose own generator was put back to what it was when the epoch *began*. Random
    numbers drawn by the dataset are others than those of the first time.

    With a torch DataLoader over a dataset with samples by number the first `n` batches are not read, only counted. Of
    anything else they are read and thrown away, which takes as long as it took the first time. `make_loader` needs
    neither the counting nor the conditions.
    """
    if type(n) is not int or n < 0:
        raise ValueError(f"n is the number of batches to leave out, got {n!r}")
    if hasattr(loader, "load_state_dict"):
        raise TypeError(f"{type(loader).__name__} keeps its own position: use its load_state_dict")
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return islice(iter(loader), n, None)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler: Any = getattr(loader, name)
    inner = getattr(sampler, "sampler", sampler)
    if isinstance(inner, RandomSampler) and inner.generator is None:
        raise ValueError(
            "this DataLoader is shuffled by torch's own generator, so the epoch would come in another order and its "
            "first batches would be other ones: use surefoot.data.make_loader(dataset, batch_size, seed=0)"
        )
    rest = copy.copy(loader)
    rest.__dict__.update({name: _Rest(sampler, n), "_iterator": None})  # torch forbids setting these, for good reason
    return iter(rest)


class _Rest:
    def __init__(self, sampler: Any, n: int) -> None:
        self._sampler, self._n = sampler, n

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._sampler), self._n, None)

    def __len__(self) -> int:
        return max(0, len(self._sampler) - self._n)
