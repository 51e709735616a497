"""Processes agree on the moment at which all of them do something that only one of them may have been asked for.

A signal reaches them at different moments, and clocks differ. Whoever is asked first names an attempt a little ahead,
in the store the processes met by; the others learn of it before they are there. No collective is added to a step.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import torch.distributed as dist

from surefoot.background import in_time

log = logging.getLogger("surefoot")

AHEAD = 1.5
"""Seconds ahead of now that are left for everyone to hear of it."""
_LEAST = 3
"""Attempts ahead, however long a step takes."""
_POLL = 0.25
_SHORT = 0.02


class RankConsensus:
    """What the processes will do together, and after which attempt."""

    def __init__(self, rank: int, world: int, word: str) -> None:
        self._alone, self._world = world == 1, world
        self._number = 0
        self._due: tuple[str, int] | None = None
        self._began = time.monotonic()
        self._first: int | None = None
        self._store: Any = None
        self._over = threading.Event()
        if not self._alone:
            self._prefix = f"surefoot/{word}"
            self._store = dist.PrefixStore(self._prefix, _store())
            threading.Thread(target=self._listen, name="surefoot-agree", daemon=True).start()

    def close(self) -> None:
        """Listen no more."""
        self._over.set()

    def propose(self, what: str, attempt: int) -> None:
        """Ask for it, as soon as all can be there; what was asked for earlier comes first."""
        if self._due is not None:
            return
        if self._alone:
            self._due = what, attempt
            return
        at = attempt + max(_LEAST, round(AHEAD / self._pace(attempt)))
        try:
            told = self._store.compare_set(str(self._number), "", f"{what}@{at}")
        except RuntimeError:  # the store has gone, and whoever held it with it: this process is on its own
            self._due = what, attempt
            return
        self._hear(told.decode())

    def due(self, attempt: int) -> str | None:
        """What is to be done after this attempt, once."""
        if self._first is None:
            self._first, self._began = attempt, time.monotonic()
        if self._due is None or attempt < self._due[1]:
            return None
        what, self._due = self._due[0], None
        self._number += 1
        return what

    @property
    def pending(self) -> str | None:
        """What was agreed on and is still to come."""
        return None if self._due is None else self._due[0]

    def done(self) -> None:
        """What is pending was done earlier, by all."""
        self._due = None
        self._number += 1

    def together(self, attempt: int) -> bool:
        """Whether all processes wait here, between this attempt and the next; all of them learn the same.

        Each says that it is here. The first to see all of them says go, and the first to lose patience says no;
        whichever was said first counts.
        """
        if self._alone:
            return True
        here, word = f"here{attempt}", f"word{attempt}"
        try:
            self._store.add(here, 1)
            until = time.monotonic() + AHEAD
            while time.monotonic() < until:
                if self._store.add(here, 0) >= self._world:
                    return self._store.compare_set(word, "", "go") == b"go"
                if self._store.check([word]):
                    return self._store.get(word) == b"go"
                time.sleep(_SHORT)
            return self._store.compare_set(word, "", "no") == b"go"
        except RuntimeError:  # the store has gone
            return False

    def _pace(self, attempt: int) -> float:
        done = max(1, attempt - (self._first if self._first is not None else attempt))
        return max(1e-4, (time.monotonic() - self._began) / done)

    def _hear(self, told: str) -> None:
        what, _, at = told.rpartition("@")
        self._due = what, int(at)

    def _listen(self) -> None:
        store = dist.PrefixStore(self._prefix, _store())  # two threads do not share a connection

        def look() -> None:
            number = self._number
            if self._due is None and store.check([str(number)]):
                told = store.get(str(number)).decode()
                if number == self._number and self._due is None:
                    self._hear(told)

        while not self._over.wait(_POLL):
            try:
                if not in_time(look):
                    return
            except RuntimeError:  # the store has gone, the processes part: there is nobody left to agree with
                return
            except Exception as error:
                log.warning(
                    "surefoot: this process no longer hears what others are asked for, such as by a signal: %s: %s",
                    type(error).__name__,
                    error,
                )
                return


def _store() -> Any:
    """A connection of our own to the store that the processes met by."""
    store: Any = dist.distributed_c10d._get_default_store()
    try:
        return store.clone()
    except (AttributeError, RuntimeError, NotImplementedError):
        return store
