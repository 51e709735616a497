"""Several micro-batches make one update, each weighed by what it holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

B = TypeVar("B")


class Group(list[B]):
    """The micro-batches of one update; `partial` where the data ended before it was full."""

    def __init__(self, batches: Iterable[B], size: int) -> None:
        super().__init__(batches)
        self.partial = len(self) < size


class Groups(Iterator[Group[B]]):
    """The batches of an iterator in groups of `size`; no batch is fetched before its group is asked for."""

    def __init__(self, batches: Iterable[B], size: int) -> None:
        if size < 1:
            raise ValueError(f"batch.accumulate: a group has 1 micro-batch or more, not {size}")
        self._batches = iter(batches)
        self._size = size

    def __next__(self) -> Group[B]:
        # One by one, so that the data is not asked for more than the group holds: where it stands is saved.
        fetched: list[B] = []
        for batch in self._batches:
            fetched.append(batch)
            if len(fetched) == self._size:
                break
        if not fetched:
            raise StopIteration
        return Group(fetched, self._size)


def shares(counts: Sequence[int | None], total: int | None = None, *, ranks: int = 1) -> list[float]:
    """What the mean loss of each micro-batch is multiplied with, so that the group counts as one big batch.

    `counts` are what the micro-batches of this rank hold (tokens that count), `total` is what the group holds on all
    `ranks` together; the ranks stand in the factor because gradients are averaged over them. Where batches have no
    count they count alike.
    """
    if None in counts:
        if any(count is not None for count in counts):
            raise ValueError(f"every micro-batch of a group has a count, or none has: got {list(counts)}")
        return [1.0 / len(counts)] * len(counts)
    known = [count for count in counts if count is not None]
    return [share_of_sum(sum(known) if total is None else total, ranks=ranks) * count for count in known]


def share_of_sum(total: int, *, ranks: int = 1) -> float:
    """What a loss is multiplied with that is a sum and not a mean; a group in which nothing counts changes nothing."""
    return ranks / total if total else 0.0
