"""Ends a run that a signal asks to end: all ranks agree on the attempt, the run is saved, and the process exits.

A signal reaches the ranks at different times, and clocks differ. The first rank proposes an attempt a little ahead, in
the store of torch.distributed; the others learn of it before they get there. No collective is added to a step.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from typing import Any

import torch.distributed as dist

from surefoot.background import run_unless_exiting
from surefoot.guard.rank_barrier import all_arrive, connect
from surefoot.guard.signal_handlers import SignalHandlers

log = logging.getLogger("surefoot")

LEAD_SECONDS = 1.5
"""How far ahead an action is proposed, so that every rank learns of it in time."""
_MIN_LEAD_ATTEMPTS = 3
"""Attempts ahead, however long a step takes."""
_POLL_SECONDS = 0.25


class Preemption:
    """Receives signals, and ends the process as they would once the run is saved."""

    def __init__(self, consensus: RankConsensus) -> None:
        self._consensus = consensus
        self._handlers: SignalHandlers | None = None
        self.signal: int | None = None
        """The signal that was received and not acted on yet."""
        self._eval_attempt = -1
        """The attempt after which the ranks last tried to end in the middle of an evaluation."""

    def install(self) -> None:
        """Handle signals from here on."""
        self._handlers = SignalHandlers(self._on_signal)

    def close(self) -> None:
        if self._handlers is not None:
            self._handlers.close()

    def _on_signal(self, number: int) -> None:
        if self.signal is not None and number == signal.SIGINT:  # whoever presses Ctrl-C twice does not want to wait
            raise KeyboardInterrupt
        if self.signal is None:  # launchers forward a signal that the process group has received already
            self.signal = number

    def end_if_signalled(self) -> None:
        """End the process if a signal was received and not acted on before the guard was closed."""
        if self.signal is not None:
            self.end(self.signal)

    @property
    def requested(self) -> bool:
        """Whether the run is to end, by a signal here or on another rank."""
        return self.signal is not None or (self._consensus.pending or "").startswith("stop")

    def propose(self, attempt: int) -> None:
        """Tell all ranks of a signal that was received here."""
        if self.signal is not None:
            self._consensus.propose(f"stop:{int(self.signal)}", attempt)

    def signal_during_eval(self, attempt: int) -> int | None:
        """The signal to end by in the middle of an evaluation, if all ranks are in one; an evaluation may take longer
        than the signal leaves time for."""
        self.propose(attempt)
        action, _, number = (self._consensus.pending or "").partition(":")
        if action != "stop" or self._eval_attempt == attempt:
            return None
        self._eval_attempt = attempt
        if not self._consensus.all_waiting(attempt):
            return None
        self._consensus.done()
        return int(number)

    def end(self, number: int) -> None:
        """End as the signal would: with exit code 128 + its number, for SIGINT with KeyboardInterrupt.

        If the program has a handler of its own, that is called and decides.
        """
        handler, self.signal = None if self._handlers is None else self._handlers.original(number), None
        if callable(handler) and handler is not signal.default_int_handler:
            handler(number, None)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            if self._handlers is not None:
                self._handlers.process_ends(128 + number)
            raise SystemExit(128 + number)


class RankConsensus:
    """What the ranks will do together, and after which attempt."""

    def __init__(self, rank: int, world: int, token: str) -> None:
        self._single_rank, self._world = world == 1, world
        self._number = 0
        """How many actions were agreed on and done; the key of the next one in the store."""
        self._agreed: tuple[str, int] | None = None
        """The action, and the attempt after which it is due."""
        self._began = time.monotonic()
        self._first_attempt: int | None = None
        self._store: Any = None
        self._closed = threading.Event()
        if not self._single_rank:
            self._prefix = f"surefoot/{token}"
            self._store = dist.PrefixStore(self._prefix, connect())
            threading.Thread(target=self._poll, name="surefoot-agree", daemon=True).start()

    def close(self) -> None:
        """Stop polling the store."""
        self._closed.set()

    def propose(self, action: str, attempt: int) -> None:
        """Propose an action as soon as all ranks can take part; an earlier proposal comes first."""
        if self._agreed is not None:
            return
        if self._single_rank:
            self._agreed = action, attempt
            return
        at = attempt + max(_MIN_LEAD_ATTEMPTS, round(LEAD_SECONDS / self._seconds_per_attempt(attempt)))
        try:
            entry = self._store.compare_set(str(self._number), "", f"{action}@{at}")
        except RuntimeError:  # the store is gone, and with it the rank that held it: this rank is on its own
            self._agreed = action, attempt
            return
        self._accept(entry.decode())

    def take_due(self, attempt: int) -> str | None:
        """The action that is due after this attempt; returned once."""
        if self._first_attempt is None:
            self._first_attempt, self._began = attempt, time.monotonic()
        if self._agreed is None or attempt < self._agreed[1]:
            return None
        action = self._agreed[0]
        self.done()
        return action

    @property
    def pending(self) -> str | None:
        """The action that was agreed on and is still to come."""
        return None if self._agreed is None else self._agreed[0]

    def done(self) -> None:
        """All ranks have done the pending action."""
        self._agreed = None
        self._number += 1

    def all_waiting(self, attempt: int) -> bool:
        """Whether all ranks wait here, between this attempt and the next; all of them get the same answer."""
        return self._single_rank or all_arrive(self._store, str(attempt), self._world, LEAD_SECONDS)

    def _seconds_per_attempt(self, attempt: int) -> float:
        attempts = max(1, attempt - (self._first_attempt if self._first_attempt is not None else attempt))
        return max(1e-4, (time.monotonic() - self._began) / attempts)

    def _accept(self, entry: str) -> None:
        action, _, attempt = entry.rpartition("@")
        self._agreed = action, int(attempt)

    def _poll(self) -> None:
        store = dist.PrefixStore(self._prefix, connect())  # two threads must not share a connection

        def look() -> None:
            number = self._number
            if self._agreed is None and store.check([str(number)]):
                entry = store.get(str(number)).decode()
                if number == self._number and self._agreed is None:
                    self._accept(entry)

        while not self._closed.wait(_POLL_SECONDS):
            try:
                if not run_unless_exiting(look):
                    return
            except RuntimeError:  # the store is gone and the ranks are leaving: nobody is left to agree with
                return
            except Exception as error:
                log.warning(
                    "surefoot: lost contact with the rank store (%s: %s); saves and signals can no longer be "
                    "coordinated with the other ranks",
                    type(error).__name__,
                    error,
                )
                return
