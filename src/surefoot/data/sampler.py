"""The resumable batch sampler, and `skip_ahead` for loaders that keep no position."""

from __future__ import annotations

import copy
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from torch.utils.data import Sampler as TorchSampler

from surefoot.data.epoch_order import EpochOrder, Indices, Position, parse_position

BATCH = "surefoot.data.batch"
_LOOKAHEAD = 4096
"""Samples whose order is computed at once: one batch at a time would cost a millisecond a batch."""
Batch = TypeVar("Batch")


class Sampler(TorchSampler[list[Any]]):
    """A batch sampler whose position is a few numbers, the same for any number of ranks.

    Each step takes the next `batch_size * world_size` samples of the epoch's order and splits them among the ranks, so
    a run saved with two ranks resumes with one or four at exactly the next sample, also with another batch size.
    Iterating continues from the position, and a finished epoch moves it to the next. The order is a function of seed
    and epoch alone; see `surefoot.data.epoch_order` for its guarantees.

    The last batch of an epoch may be smaller (or is dropped with `drop_last`); it is split among ranks as evenly as
    possible. Every rank needs a sample in every step: if fewer would be left over, they join the batch before. Only if
    no batch comes before, because a run with fewer ranks was saved close to the end of its epoch, are some samples
    repeated, with a warning.

    Banned samples are skipped from the next batch on, in later epochs too; the batch is filled with the samples after
    them, whose order stays. A ban holds until it is lifted, also where a position is loaded that was saved before it.
    All ranks must ban the same ones. In a loader that prefetches call the loader's `ban`, `lift`, `set_epoch` and
    `load_state_dict`, which also discard prefetched batches.

    With `with_epoch` the batches hold pairs (epoch, sample) instead of samples.
    """

    def __init__(
        self,
        dataset: Sized | int,
        batch_size: int,
        *,
        seed: int,
        shuffle: bool = True,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        with_epoch: bool = False,
    ) -> None:
        length = dataset if isinstance(dataset, int) else len(dataset)
        for name, value, least in (("batch_size", batch_size, 1), ("world_size", world_size, 1), ("rank", rank, 0)):
            if type(value) is not int or value < least:
                raise ValueError(f"{name} must be a whole number, at least {least}; got {value!r}")
        if rank >= world_size:
            raise ValueError(f"rank {rank} is out of range: world_size is {world_size}, and ranks count from 0")
        if type(seed) is not int or not 0 <= seed < 1 << 64:
            raise ValueError(f"seed must be a whole number from 0 to 2**64 - 1, got {seed!r}")
        self.batch_size, self.drop_last = batch_size, drop_last
        self.rank, self.world_size = rank, world_size
        self._with_epoch = with_epoch
        self._jumps = 0
        self.issued: deque[list[Any]] | None = None
        """The batches handed out that a loader has not yet passed on, where one keeps account of them."""
        self._position = Position(seed=seed, length=length, shuffle=bool(shuffle))
        self._check_enough(self._position)

    @property
    def position(self) -> Position:
        """The position after the last batch."""
        return self._position

    @property
    def epoch(self) -> int:
        return self._position.epoch

    def state_dict(self) -> dict[str, Any]:
        return self._position.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a saved position; raises `WrongPosition`, a ValueError, if it is damaged or of other data.

        Samples that are banned here stay banned, beside those that were banned when it was saved.
        """
        position = parse_position(state_dict)
        position.check_same_data(self._position)
        if set(self._position.banned).difference(position.banned):
            position = position.with_banned(set(self._position.banned))
            self._check_enough(position)
        self._move_to(position)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of this epoch; does nothing within that epoch, so a resumed loop may call it as usual."""
        if type(epoch) is not int or epoch < 0:
            raise ValueError(f"epoch must be a whole number, at least 0; got {epoch!r}")
        if epoch != self._position.epoch:
            self._move_to(self._position.at(epoch, 0))

    def ban(self, samples: int | Iterable[int]) -> None:
        """Never yield these samples again."""
        indices = {int(i) for i in ([samples] if isinstance(samples, int) else samples)}
        outside = sorted(i for i in indices if not 0 <= i < self._position.length)
        if outside:
            raise ValueError(f"cannot ban {outside[:5]}: samples are numbered from 0 to {self._position.length - 1}")
        position = self._position.with_banned(indices)
        self._check_enough(position)
        self._move_to(position)

    def lift(self, samples: int | Iterable[int]) -> None:
        """Yield these samples again, as if they had never been banned."""
        indices = {int(i) for i in ([samples] if isinstance(samples, int) else samples)}
        self._move_to(self._position.without_banned(indices))

    def _move_to(self, position: Position) -> None:
        self._position = position
        self._jumps += 1

    def _check_enough(self, position: Position) -> None:
        left = position.length - len(position.banned)
        needed = self.world_size * (self.batch_size if self.drop_last else 1)
        if left < max(1, needed):
            banned = f", {len(position.banned)} of them banned," if position.banned else ""
            raise ValueError(
                f"the dataset has {position.length} samples{banned} and a step needs at least {needed}: there would be "
                f"no batch at all (batch_size={self.batch_size}, world_size={self.world_size}, "
                f"drop_last={self.drop_last})"
            )

    def __len__(self) -> int:
        """Batches per epoch."""
        full, rest = divmod(self._position.length - len(self._position.banned), self.batch_size * self.world_size)
        extra = rest >= (self.world_size if full else 1)  # else the rest joins the batch before
        return full + (extra and not self.drop_last)

    def __iter__(self) -> Iterator[list[Any]]:
        return _BatchIterator(self._batches())

    def _batches(self) -> Iterator[list[Any]]:
        while True:
            jumps = self._jumps
            for batch, cursor in self._batches_from(self._position):
                self._position = self._position.at(self._position.epoch, cursor)
                if self.issued is not None:
                    self.issued.append(batch)
                yield batch
                if self._jumps != jumps:
                    break
            else:
                self._position = self._position.at(self._position.epoch + 1, 0)
                return

    def _batches_from(self, position: Position) -> Iterator[tuple[list[Any], int]]:
        """The batches of the rest of an epoch, each with the cursor after it."""
        allowed = _AllowedSamples(position)
        first = allowed.count_before(position.cursor)
        sizes = self._sizes(allowed.count - first)
        while next_sizes := list(islice(sizes, 1 + _LOOKAHEAD // self.batch_size)):
            ends = first + np.cumsum(next_sizes)
            shares = [self._share(int(end) - n, n) for end, n in zip(ends, next_sizes, strict=True)]
            samples = allowed.samples(np.concatenate(shares)).tolist()
            items = [(position.epoch, i) for i in samples] if self._with_epoch else samples
            at = 0
            for share, cursor in zip(shares, allowed.places(ends - 1) + 1, strict=True):
                yield items[at : at + len(share)], int(cursor)
                at += len(share)
            first = int(ends[-1])

    def _sizes(self, left: int) -> Iterator[int]:
        """How many samples each step takes, over all ranks."""
        full = self.batch_size * self.world_size
        while left >= (full if self.drop_last else 1):
            rest = left - full
            size = left if rest <= 0 or (not self.drop_last and rest < self.world_size) else full
            yield size
            left -= size

    def _share(self, first: int, size: int) -> Indices:
        """This rank's share of the `size` samples from `first` on."""
        if size < self.world_size:
            warnings.warn(
                f"{size} samples are left in the epoch for {self.world_size} ranks: some are repeated so that every "
                "rank has one",
                stacklevel=2,
            )
            return np.array([first + self.rank % size])
        return np.arange(first + size * self.rank // self.world_size, first + size * (self.rank + 1) // self.world_size)


class _BatchIterator(Iterator[list[Any]]):
    """Reports the last batch to torchdata, which calls `state_dict` after every one."""

    def __init__(self, batches: Iterator[list[Any]]) -> None:
        self._batches = batches
        self._last: list[Any] = []

    def __next__(self) -> list[Any]:
        self._last = next(self._batches)
        return self._last

    def state_dict(self) -> dict[str, Any]:
        return {"kind": BATCH, "samples": self._last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to do: the sampler has its own position."""


class _AllowedSamples:
    """The samples of an epoch that are not banned, numbered consecutively."""

    def __init__(self, position: Position) -> None:
        self._order = EpochOrder(position.length, seed=position.seed, epoch=position.epoch, shuffle=position.shuffle)
        self._banned = np.sort(self._order.places(np.array(position.banned, dtype=np.int64)))
        self._gaps = self._banned - np.arange(len(self._banned))
        self.count = position.length - len(self._banned)

    def count_before(self, cursor: int) -> int:
        return cursor - int(np.searchsorted(self._banned, cursor))

    def places(self, numbers: Indices) -> Indices:
        return numbers + np.searchsorted(self._gaps, numbers, side="right")

    def samples(self, numbers: Indices) -> Indices:
        return self._order.samples(self.places(numbers))


def skip_ahead(loader: Iterable[Batch], n: int) -> Iterator[Batch]:
    """One loop over `loader` without its first `n` batches, for the epoch in which a run was stopped.

    It is only correct when the epoch comes in the same order again: no shuffling, a DistributedSampler after the same
    `set_epoch`, or a RandomSampler whose own generator was restored to its state at the *start* of the epoch. Random
    numbers drawn by the dataset differ from those of the first time.

    With a torch DataLoader over a map-style dataset the first `n` batches are skipped without being read. Of anything
    else they are read and discarded, which takes as long as it took the first time. `make_loader` has neither the cost
    nor the conditions.
    """
    if type(n) is not int or n < 0:
        raise ValueError(f"n is the number of batches to skip, got {n!r}")
    if hasattr(loader, "load_state_dict"):
        raise TypeError(f"{type(loader).__name__} keeps its own position: use its load_state_dict")
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return islice(iter(loader), n, None)
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    sampler: Any = getattr(loader, name)
    inner = getattr(sampler, "sampler", sampler)
    if isinstance(inner, RandomSampler) and inner.generator is None:
        raise ValueError(
            "this DataLoader is shuffled by torch's global generator, so the epoch would come in another order and the "
            "wrong batches would be skipped: use surefoot.data.make_loader(dataset, batch_size, seed=0)"
        )
    rest = copy.copy(loader)
    # DataLoader.__setattr__ forbids replacing these; nothing has used the copy yet.
    rest.__dict__.update({name: _SkippingSampler(sampler, n), "_iterator": None})
    return iter(rest)


class _SkippingSampler:
    def __init__(self, sampler: Any, n: int) -> None:
        self._sampler, self._n = sampler, n

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._sampler), self._n, None)

    def __len__(self) -> int:
        return max(0, len(self._sampler) - self._n)
