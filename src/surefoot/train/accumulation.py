"""Several micro-batches make one update, each weighed by what it holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
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


def share_of_sum(total: int, *, ranks: int = 1) -> float:
    """What a loss that is a sum is multiplied with, so that the group counts as one big batch of `total` that count.

    The ranks stand in the factor because gradients are averaged over them. A group in which nothing counts changes
    nothing.
    """
    return ranks / total if total else 0.0
