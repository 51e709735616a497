"""Signal handlers that let a run end in its own time; closing them restores the previous handlers."""

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
_EXIT_SECONDS = 30.0
"""Time in which a process that has raised SystemExit is expected to end."""


class SignalHandlers:
    """Calls `on_signal`, a bound method, for each signal; holds it weakly, and leaves ignored signals ignored."""

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        self._on_signal = weakref.WeakMethod(on_signal)
        self._originals: dict[int, Any] = {}
        self._exit_code: ExitCodeKeeper | None = None
        self._closed = threading.current_thread() is not threading.main_thread()
        for number in () if self._closed else SIGNALS:
            original = signal.getsignal(number)
            if original is not None and original is not signal.SIG_IGN:
                self._originals[number] = original
                signal.signal(number, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._exit_code is not None and number != signal.SIGINT:
            self._exit_code(number, frame)
            return
        on_signal = self._on_signal()
        if on_signal is not None and not self._closed:
            on_signal(number)
            return
        self.close()  # the owner was collected without closing this
        if signal.getsignal(number) is not self:
            signal.raise_signal(number)

    def original(self, number: int) -> Any:
        """The handler that the program itself had installed."""
        handler = self._originals.get(number)
        while isinstance(handler, SignalHandlers) and handler._closed:
            handler = handler._originals.get(number)
        return signal.SIG_DFL if isinstance(handler, ExitCodeKeeper) else handler

    def process_ends(self, code: int) -> None:
        """The process is about to exit with this code: the same signal again must not change that."""
        self._exit_code = ExitCodeKeeper(code)
        if self._closed:
            self._exit_code.install(self._originals)

    def close(self) -> None:
        """Restore the original handlers, unless somebody has installed one on top of this."""
        self._closed = True
        if threading.current_thread() is threading.main_thread():
            for number in self._originals:
                if signal.getsignal(number) is self:
                    signal.signal(number, self.original(number))
            if self._exit_code is not None:
                self._exit_code.install(self._originals)


class ExitCodeKeeper:
    """Ignores signals that come again while a process exits, so that its exit code stays the same.

    Without this a launcher's second SIGTERM, or one in the last moments of the interpreter, would kill it.
    """

    def __init__(self, code: int) -> None:
        self._code = code
        self._since = time.monotonic()
        atexit.register(self._ignore)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() - self._since > _EXIT_SECONDS:  # somebody caught SystemExit, and the process lives on
            os._exit(self._code)

    def install(self, numbers: Iterable[int]) -> None:
        """Handle those of the signals that would kill the process; SIGINT stays with the person at the keyboard."""
        for number in numbers if threading.current_thread() is threading.main_thread() else ():
            if number != signal.SIGINT and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self)

    def _ignore(self) -> None:
        """In its last moments the interpreter restores the default action of every signal with a Python handler."""
        for number in SIGNALS:
            handler = signal.getsignal(number)
            if handler is self or (isinstance(handler, SignalHandlers) and handler._exit_code is self):
                signal.signal(number, signal.SIG_IGN)
