"""Signals that a run hears instead of being ended by them, as long as it lives; then they are what they were."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

_NAMES = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGHUP")
SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
"""What a cluster, or a person, sends before a process has to end."""
_ENDING = 30.0
"""Seconds in which a process that has raised SystemExit is expected to end."""


class SignalHandlers:
    """Tells `heard`, a method, of each signal; it keeps nobody alive, and signals that are ignored stay so."""

    def __init__(self, heard: Callable[[int], None]) -> None:
        self._heard = weakref.WeakMethod(heard)
        self._before: dict[int, Any] = {}
        self._ending: Ending | None = None
        self._over = threading.current_thread() is not threading.main_thread()
        for number in () if self._over else SIGNALS:
            before = signal.getsignal(number)
            if before is not None and before is not signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._ending is not None and number != signal.SIGINT:
            self._ending(number, frame)
            return
        heard = self._heard()
        if heard is not None and not self._over:
            heard(number)
            return
        self.close()  # whoever listened has gone without a word
        if signal.getsignal(number) is not self:
            signal.raise_signal(number)

    def before(self, number: int) -> Any:
        """What the program itself had wanted to be done at this signal."""
        found = self._before.get(number)
        while isinstance(found, SignalHandlers) and found._over:
            found = found._before.get(number)
        return signal.SIG_DFL if isinstance(found, Ending) else found

    def process_ends(self, code: int) -> None:
        """The process is about to end with this exit code: the same signal again is not to change that."""
        self._ending = Ending(code)
        if self._over:
            self._ending.install(self._before)

    def close(self) -> None:
        """Let signals be what they were, unless somebody has put a handler on top of this one."""
        self._over = True
        if threading.current_thread() is threading.main_thread():
            for number in self._before:
                if signal.getsignal(number) is self:
                    signal.signal(number, self.before(number))
            if self._ending is not None:
                self._ending.install(self._before)


class Ending:
    """Ignores the signals that come again while a process ends, so that its exit code stays the same.

    Without this the second SIGTERM of a launcher, or one in the last moments of the interpreter, would kill it.
    """

    def __init__(self, code: int) -> None:
        self._code = code
        self._since = time.monotonic()
        atexit.register(self._ignore)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() - self._since > _ENDING:  # somebody has caught SystemExit, and the process lives on
            os._exit(self._code)

    def install(self, numbers: Iterable[int]) -> None:
        """Take those of the signals that would kill the process; SIGINT stays with whoever sits at the keyboard."""
        for number in numbers if threading.current_thread() is threading.main_thread() else ():
            if number != signal.SIGINT and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self)

    def _ignore(self) -> None:
        """In its last moments the interpreter gives every signal that a function handles its default action back."""
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if handler is self or (isinstance(handler, SignalHandlers) and handler._ending is self):
                signal.signal(number, signal.SIG_IGN)
