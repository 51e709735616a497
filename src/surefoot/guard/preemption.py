"""Ends a run that a signal asks to end: all ranks agree on the attempt, the run is saved, and the process exits."""

from __future__ import annotations

import signal

from surefoot.guard.rank_consensus import RankConsensus
from surefoot.guard.signal_handlers import SignalHandlers


class Preemption:
    """Receives signals, and ends the process as they would once the run is saved."""

    def __init__(self, consensus: RankConsensus) -> None:
        self._consensus = consensus
        self._handlers: SignalHandlers | None = None
        self._signal: int | None = None
        """The signal that was received."""
        self._eval_attempt = -1
        """The attempt after which the ranks last tried to end in the middle of an evaluation."""

    def install(self) -> None:
        """Handle signals from here on."""
        self._handlers = SignalHandlers(self._on_signal)

    def close(self) -> None:
        if self._handlers is not None:
            self._handlers.close()

    def _on_signal(self, number: int) -> None:
        if self._signal is not None and number == signal.SIGINT:  # whoever presses Ctrl-C twice does not want to wait
            raise KeyboardInterrupt
        if self._signal is None:  # launchers forward a signal that the process group has received already
            self._signal = number

    def end_if_signalled(self) -> None:
        """End the process if a signal was received and not acted on before the guard was closed."""
        if self._signal is not None:
            self.end(self._signal)

    @property
    def requested(self) -> bool:
        """Whether the run is to end, by a signal here or on another rank."""
        return self._signal is not None or (self._consensus.pending or "").startswith("stop")

    def propose(self, attempt: int) -> None:
        """Tell all ranks of a signal that was received here."""
        if self._signal is not None:
            self._consensus.propose(f"stop:{int(self._signal)}", attempt)

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
        handler, self._signal = None if self._handlers is None else self._handlers.original(number), None
        if callable(handler) and handler is not signal.default_int_handler:
            handler(number, None)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            if self._handlers is not None:
                self._handlers.process_ends(128 + number)
            raise SystemExit(128 + number)
