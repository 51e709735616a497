"""What the ranks agree on during a trial, so that all of them run the same branches and none waits for another."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist

from surefoot.measure.cross_rank import Ranks

log = logging.getLogger("surefoot")
T = TypeVar("T")


class TrialFailed(Exception):
    """A trial could not be run to its end; the message says why."""


class RankFailed(TrialFailed):
    """This or another rank could not go on with a trial, so all ranks end it; the message says which and why."""


class HasAttempt(Protocol):
    @property
    def attempt(self) -> int: ...


S = TypeVar("S", bound=HasAttempt)


class RankAgreement:
    """Exchanges a few numbers between the ranks of a run; every method is called by all ranks, in the same order.

    On a single rank nothing is exchanged, and errors are raised as they are.
    """

    def __init__(self, ranks: Ranks | None = None) -> None:
        self._ranks = None if ranks is None or ranks.world_size == 1 else ranks

    @property
    def alone(self) -> bool:
        return self._ranks is None

    @property
    def rank(self) -> int:
        return 0 if self._ranks is None else self._ranks.rank

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The numbers of all ranks, as many from each."""
        if self._ranks is None:
            return [list(values)]
        packet = torch.tensor(values, dtype=torch.float64, device=self._ranks.owned.device)
        return self._ranks.gather(packet).tolist()  # waits for the device, in a trial only

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return any(row[0] for row in self.gather([flag]))

    def from_first(self, value: T) -> T:
        """Rank 0's value."""
        return value if self._ranks is None else self._ranks.broadcast(value)

    def together(self, call: Callable[[], T]) -> T:
        """Call it on all ranks; where it raises on one, all of them raise."""
        if self._ranks is None:
            return call()
        values: list[T] = []
        self.exchange(lambda: values.append(call()) or [], 0)
        return values[0]

    def exchange(self, call: Callable[[], Sequence[float]], count: int) -> list[list[float]]:
        """Call it on all ranks, and return the `count` numbers that each of them got; where it raises on one, all of
        them raise."""
        if self._ranks is None:
            return [list(call())]
        error: Exception | None = None
        values: Sequence[float] = ()
        try:
            values = call()
        except Exception as raised:  # the other ranks are told of every kind, or they would wait for this one
            error = raised
        rows = self.gather([error is not None, *(values if error is None else [math.nan] * count)])
        if any(row[0] for row in rows):
            raise self._failure(error) from error
        return [row[1:] for row in rows]

    def _failure(self, error: Exception | None) -> RankFailed:
        """The reasons of all ranks on which something failed."""
        assert self._ranks is not None
        text = (
            ""
            if error is None
            else str(error)
            if isinstance(error, TrialFailed)
            else f"{type(error).__name__}: {error}"
        )
        if error is not None and not isinstance(error, TrialFailed | torch.OutOfMemoryError):
            log.error("surefoot: a trial failed on rank %d: %s", self._ranks.rank, text, exc_info=error)
        texts: list[str | None] = [None] * self._ranks.world_size
        dist.all_gather_object(texts, text)
        named = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
        same = {text for text in texts if text}
        return RankFailed(f"all ranks: {next(iter(same))}" if len(same) == 1 and all(texts) else "; ".join(named))

    def common(self, items: Sequence[S]) -> list[S]:
        """Those of these items, at different attempts, that every rank has."""
        if self._ranks is None:
            return list(items)
        longest = max(int(row[0]) for row in self.gather([len(items)]))
        attempts = set(self._ranks.intersect([item.attempt for item in items], longest)) if longest else set[int]()
        return [item for item in items if item.attempt in attempts]
