"""Which samples come next, for every rank: an order that seed and epoch decide, and a cursor in it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import Sampler as TorchSampler

from surefoot.data.order import EpochOrder, Places
from surefoot.data.position import Position, parse_position

BATCH = "surefoot.data.batch"
_AHEAD = 4096
"""Samples whose order is worked out at once: one at a time would cost a millisecond a batch."""


class Sampler(TorchSampler[list[Any]]):
    """A batch sampler whose place in the data is a few numbers, the same for any number of ranks.

    Each step takes the next `batch_size * world_size` samples of the epoch's order and splits them among the ranks, so
    a run saved with two ranks goes on with one or four at exactly the next sample, also with another batch size.
    Iterating goes on from the position, and a finished epoch moves it to the next. The order is a function of seed and
    epoch alone, see `surefoot.data.order` for what that promises.

    The last batch of an epoch may be smaller (or is left out with `drop_last`); ranks share it as evenly as can be.
    Every rank needs a sample in every step: when fewer than that would be left they join the batch before, and only
    where a run with fewer ranks was saved so close to the end of its epoch that none comes before are some repeated,
    with a warning.

    Banned samples are passed over from the next batch on, in later epochs too; the batch is filled up with the samples
    after them, whose order stays. All ranks must ban the same ones. In a loader that reads ahead call the loader's
    `ban`, `set_epoch` and `load_state_dict`, which also take back what was read ahead.

    With `epochs` the batches hold pairs (epoch, sample) in place of samples.
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
            raise ValueError(f"rank {rank} is none of {world_size} ranks, which count from 0")
        if type(seed) is not int or not 0 <= seed < 1 << 64:
            raise ValueError(f"seed must be a whole number from 0 to 2**64 - 1, got {seed!r}")
        self.batch_size, self.drop_last = batch_size, drop_last
        self.rank, self.world_size = rank, world_size
        self._epochs = with_epoch
        self._turn = 0
        self._place = Position(seed=seed, length=length, shuffle=bool(shuffle))
        self._check_enough(self._place)

    # -- the position

    @property
    def position(self) -> Position:
        """After the batch that was given out last."""
        return self._place

    @property
    def epoch(self) -> int:
        return self._place.epoch

    def state_dict(self) -> dict[str, Any]:
        return self._place.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from there; raises `WrongPosition`, a ValueError, when the state is damaged or of other data."""
        there = parse_position(state_dict)
        there.check_same_data(self._place)
        self._go(there)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of this epoch; within it already, stay: a resumed loop may call this as usual."""
        if type(epoch) is not int or epoch < 0:
            raise ValueError(f"epoch must be a whole number, at least 0; got {epoch!r}")
        if epoch != self._place.epoch:
            self._go(self._place.at(epoch, 0))

    def ban(self, samples: int | Iterable[int]) -> None:
        """Never give these samples out again."""
        given = {int(i) for i in ([samples] if isinstance(samples, int) else samples)}
        wrong = sorted(i for i in given if not 0 <= i < self._place.length)
        if wrong:
            raise ValueError(f"cannot ban {wrong[:5]}: samples are numbered from 0 to {self._place.length - 1}")
        there = self._place.with_banned(given)
        self._check_enough(there)
        self._go(there)

    def _go(self, there: Position) -> None:
        self._place = there
        self._turn += 1

    def _check_enough(self, there: Position) -> None:
        left, needed = there.length - len(there.banned), self.world_size * (self.batch_size if self.drop_last else 1)
        if left < max(1, needed):
            banned = f", {len(there.banned)} of them banned," if there.banned else ""
            raise ValueError(
                f"the dataset has {there.length} samples{banned} and a step needs at least {needed}: with fewer no "
                f"batch would ever come (batch_size={self.batch_size}, world_size={self.world_size}, "
                f"drop_last={self.drop_last})"
            )

    # -- the batches

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        whole, rest = divmod(self._place.length - len(self._place.banned), self.batch_size * self.world_size)
        alone = rest >= (self.world_size if whole else 1)  # else the rest joins the batch before
        return whole + (alone and not self.drop_last)

    def __iter__(self) -> Iterator[list[Any]]:
        return _Batches(self._batches())

    def _batches(self) -> Iterator[list[Any]]:
        while True:
            turn = self._turn
            for batch, after in self._from(self._place):
                self._place = self._place.at(self._place.epoch, after)
                yield batch
                if self._turn != turn:
                    break
            else:
                self._place = self._place.at(self._place.epoch + 1, 0)
                return

    def _from(self, here: Position) -> Iterator[tuple[list[Any], int]]:
        """The batches of the rest of an epoch, each with the cursor after it."""
        open_ = _Open(here)
        first = open_.before(here.cursor)
        sizes = self._sizes(open_.count - first)
        while ahead := list(islice(sizes, 1 + _AHEAD // self.batch_size)):
            ends = first + np.cumsum(ahead)
            shares = [self._share(int(end) - n, n) for end, n in zip(ends, ahead, strict=True)]
            samples = open_.samples(np.concatenate(shares)).tolist()
            told = [(here.epoch, i) for i in samples] if self._epochs else samples
            at = 0
            for share, after in zip(shares, open_.places(ends - 1) + 1, strict=True):
                yield told[at : at + len(share)], int(after)
                at += len(share)
            first = int(ends[-1])

    def _sizes(self, left: int) -> Iterator[int]:
        """How many samples each step takes, over all ranks."""
        whole = self.batch_size * self.world_size
        while left >= (whole if self.drop_last else 1):
            rest = left - whole
            size = left if rest <= 0 or (not self.drop_last and rest < self.world_size) else whole
            yield size
            left -= size

    def _share(self, first: int, size: int) -> Places:
        """This rank's part of the `size` samples from `first` on."""
        if size < self.world_size:
            warnings.warn(
                f"{size} samples are left in the epoch for {self.world_size} ranks: some come twice, so that every "
                "rank has one",
                stacklevel=2,
            )
            return np.array([first + self.rank % size])
        return np.arange(first + size * self.rank // self.world_size, first + size * (self.rank + 1) // self.world_size)


class _Batches(Iterator[list[Any]]):
    """Tells torchdata, which asks after every batch, what was in it."""

    def __init__(self, batches: Iterator[list[Any]]) -> None:
        self._batches = batches
        self._last: list[Any] = []

    def __next__(self) -> list[Any]:
        self._last = next(self._batches)
        return self._last

    def state_dict(self) -> dict[str, Any]:
        return {"kind": BATCH, "samples": self._last}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to do: the sampler's position says it all."""


class _Open:
    """The samples of an epoch that are not banned, numbered through."""

    def __init__(self, here: Position) -> None:
        self._order = EpochOrder(here.length, seed=here.seed, epoch=here.epoch, shuffle=here.shuffle)
        self._banned = np.sort(self._order.places(np.array(here.banned, dtype=np.int64)))
        self._gaps = self._banned - np.arange(len(self._banned))
        self.count = here.length - len(self._banned)

    def before(self, cursor: int) -> int:
        """How many come before a place."""
        return cursor - int(np.searchsorted(self._banned, cursor))

    def places(self, numbers: Places) -> Places:
        return numbers + np.searchsorted(self._gaps, numbers, side="right")

    def samples(self, numbers: Places) -> Places:
        return self._order.samples(self.places(numbers))
