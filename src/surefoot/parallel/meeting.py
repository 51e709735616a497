"""Processes meet anew after every restart: what those before them left in the store is not taken for theirs.

torchrun keeps its store when it starts the processes again, with the addresses of those that are gone; and its count of
restarts is not the same on a host that has joined later. So the first process thinks of a word, and tells it to each
that asks; a question has a number of its own, so that an answer is never older than the question.
"""

from __future__ import annotations

import secrets
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

if TYPE_CHECKING:
    from torch.distributed import Store

_POLL = 0.02
_ASKED = "surefoot/asked"


def open_store(rank: int, size: int, timeout: timedelta) -> Store:
    """A store in which these processes find each other and nobody else."""
    store, _, _ = next(rendezvous("env://", rank, size, timeout=timeout))
    store.set_timeout(timeout)
    word = _tell(store, size, time.monotonic() + timeout.total_seconds()) if rank == 0 else _ask(store)
    return dist.PrefixStore(f"surefoot/{word}", store)


def _tell(store: Store, size: int, deadline: float) -> str:
    """Answer whoever asks, until all the others have heard."""
    word, answered = secrets.token_hex(8), 0
    while (heard := store.add(f"surefoot/heard/{word}", 0)) < size - 1:
        asked = store.add(_ASKED, 0)
        for number in range(answered + 1, asked + 1):
            store.set(f"surefoot/word/{number}", word)
        answered = asked
        if time.monotonic() > deadline:
            raise TimeoutError(f"only {heard + 1} of {size} processes came")
        time.sleep(_POLL)
    return word


def _ask(store: Store) -> str:
    number = store.add(_ASKED, 1)
    word = store.get(f"surefoot/word/{number}").decode()
    store.add(f"surefoot/heard/{word}", 1)
    return word
