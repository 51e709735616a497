"""Makes sure that all ranks have come to the same point before they begin collectives that no loop expects.

A rank may lose its protection in the very step after which the others rewind or run a trial together. In a collective
they would wait for it for ever; a barrier in the store of torch.distributed ends after a while.
"""

from __future__ import annotations

import secrets
import time
from typing import Any

import torch.distributed as dist

from surefoot.measure.cross_rank import Ranks

BARRIER_SECONDS = 60.0
"""How long ranks wait for each other: on a GPU one host may be a few steps ahead of another."""
_WAIT_SECONDS = 0.02


def connect() -> Any:
    """A connection of our own to the default store of torch.distributed."""
    store: Any = dist.distributed_c10d._get_default_store()
    try:
        return store.clone()
    except (AttributeError, RuntimeError, NotImplementedError):
        return store


def all_arrive(store: Any, name: str, world_size: int, seconds: float) -> bool:
    """Whether all ranks call this with the same new name within this time; all of them get the same answer.

    Each rank counts itself in. The first that sees all of them writes "go", and the first whose time is over writes
    "no"; whichever was written first counts.
    """
    count_key, answer_key = f"arrived{name}", f"answer{name}"
    try:
        store.add(count_key, 1)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if store.add(count_key, 0) >= world_size:
                return store.compare_set(answer_key, "", "go") == b"go"
            if store.check([answer_key]):
                return store.get(answer_key) == b"go"
            time.sleep(_WAIT_SECONDS)
        return store.compare_set(answer_key, "", "no") == b"go"
    except RuntimeError:  # the store is gone
        return False


def barrier_of(ranks: Ranks) -> RankBarrier | None:
    """The barriers of these ranks, which all call this; None for a single one."""
    return None if ranks.world_size == 1 else RankBarrier(ranks.world_size, ranks.broadcast(secrets.token_hex(8)))


class RankBarrier:
    """Barriers with a timeout for the ranks of one run, which all ranks enter in the same order."""

    def __init__(self, world_size: int, token: str) -> None:
        self._world_size, self._token = world_size, token
        self._store: Any = None
        self._number = 0
        self._missed = False
        """A rank did not come to a barrier: there are no further ones."""

    def wait(self) -> bool:
        """Whether all ranks have come."""
        if self._missed:
            return False
        if self._store is None:
            self._store = dist.PrefixStore(f"surefoot/barrier/{self._token}", connect())
        self._number += 1
        self._missed = not all_arrive(self._store, str(self._number), self._world_size, BARRIER_SECONDS)
        return not self._missed
