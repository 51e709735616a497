"""A run that is told to end: which signal came, what all processes agree on, and how it ends then."""

from __future__ import annotations

import signal

from surefoot.guard.rank_consensus import RankConsensus
from surefoot.guard.signal_handlers import SignalHandlers


class Preemption:
    """Hears signals, and ends the run as they would have it once it is saved."""

    def __init__(self, agreement: RankConsensus) -> None:
        self._agreement = agreement
        self._hearing: SignalHandlers | None = None
        self._asked: int | None = None
        """A signal that came."""
        self._tried = -1
        """The attempt after which the processes last tried to end in the middle of an evaluation."""

    def listen(self) -> None:
        """From here on signals end the run at a good moment."""
        self._hearing = SignalHandlers(self._signalled)

    def close(self) -> None:
        if self._hearing is not None:
            self._hearing.close()

    def _signalled(self, number: int) -> None:
        if self._asked is not None and number == signal.SIGINT:  # a person who asks twice does not want to wait
            raise KeyboardInterrupt
        if self._asked is None:  # launchers pass a signal on that the process group has had already: once is enough
            self._asked = number

    def end_if_asked(self) -> None:
        """End the process by a signal that came and was not answered before the guard was closed."""
        if self._asked is not None:
            self.end(self._asked)

    @property
    def wanted(self) -> bool:
        """Whether the run is to end, by a signal here or in another process."""
        return self._asked is not None or (self._agreement.pending or "").startswith("stop")

    def ask(self, attempt: int) -> None:
        """Let all processes know of a signal that came."""
        if self._asked is not None:
            self._agreement.propose(f"stop:{int(self._asked)}", attempt)

    def now(self, attempt: int) -> int | None:
        """In an evaluation, which may take longer than there is time: the signal to end at, if all are at one too."""
        self.ask(attempt)
        what, _, number = (self._agreement.pending or "").partition(":")
        if what != "stop" or self._tried == attempt:
            return None
        self._tried = attempt
        if not self._agreement.together(attempt):
            return None
        self._agreement.done()
        return int(number)

    def end(self, number: int) -> None:
        """End as the signal would have it: with exit code 128 + its number, for SIGINT by KeyboardInterrupt.

        Where the program has a handler of its own, ending is up to that.
        """
        handler, self._asked = None if self._hearing is None else self._hearing.before(number), None
        if callable(handler) and handler is not signal.default_int_handler:
            handler(number, None)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
        else:
            if self._hearing is not None:
                self._hearing.process_ends(128 + number)
            raise SystemExit(128 + number)
