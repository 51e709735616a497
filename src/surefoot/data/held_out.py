"""Data to evaluate on: which texts are held out, and batches of them that no two ranks share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surefoot.data.order import EpochOrder
from surefoot.data.sound import ReplaceUnreadable, ReportingCollate, UnreadableLog

_SEED = 0x48454C44
"""What is held out is the same for every seed of a run, so that runs can be compared."""


def choose_eval_texts(digests: NDArray[np.uint64], lengths: NDArray[np.int64], share: float) -> NDArray[np.bool_]:
    """True for texts to hold out: about a `share` of the tokens; texts that are alike stay on the same side.

    Which ones is up to their content, not to their names or order. At least one is chosen, the shortest if none is
    short enough, and never all: with a single text, or copies of one, none.
    """
    if share <= 0 or not len(digests):
        return np.zeros(len(digests), bool)
    groups, member = np.unique(digests, return_inverse=True)
    sizes = np.bincount(member, weights=lengths).astype(np.int64)
    if len(groups) < 2:
        return np.zeros(len(digests), bool)
    left, chosen = share * int(sizes.sum()), np.zeros(len(groups), bool)
    for group, size in enumerate(sizes.tolist()):
        if size <= left:
            chosen[group], left = True, left - size
    if not chosen.any() or chosen.all():
        chosen[:] = False
        chosen[int(sizes.argmin())] = True
    return chosen[member]


def choose_eval_samples(length: int, share: float) -> NDArray[np.int64]:
    """The numbers of samples to hold out, of a dataset about which no more is known."""
    count = min(max(1, round(length * share)), length - 1) if share > 0 else 0
    return np.sort(EpochOrder(length, seed=_SEED, epoch=0, shuffle=True).samples(np.arange(count)))


class EvalLoader:
    """Batches of one rank, the same in every loop, mixed so that the first few tell about the whole.

    Every rank has as many samples as every other, and so as many batches; of the rest (fewer than ranks) none is used.
    With fewer samples than ranks they share, so that no rank is without.
    """

    def __init__(
        self,
        dataset: ReplaceUnreadable,
        collate: ReportingCollate,
        record: UnreadableLog,
        *,
        batch_size: int,
        rank: int,
        world: int,
    ):
        self._dataset, self._collate, self._record = dataset, collate, record
        self._batch_size = batch_size
        self._order = EpochOrder(len(dataset), seed=_SEED, epoch=1, shuffle=True)
        each = len(dataset) // world
        first = rank * each if each else rank % len(dataset)
        self._places = range(first, first + max(1, each))

    @property
    def samples(self) -> list[int]:
        """The numbers of those that this rank has."""
        return self._order.samples(np.array(self._places)).tolist()

    def set_vocab(self, vocab: int) -> None:
        """Tokens from here on make a sample unreadable."""
        self._dataset.set_vocab(vocab)

    def __len__(self) -> int:
        return (len(self._places) + self._batch_size - 1) // self._batch_size

    def __iter__(self) -> Iterator[Any]:
        for first in range(0, len(self._places), self._batch_size):
            wanted = self._order.samples(np.array(self._places[first : first + self._batch_size])).tolist()
            yield self._record.unwrap(self._collate(self._dataset.__getitems__(wanted)))
