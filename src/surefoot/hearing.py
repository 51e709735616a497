"""Signals that a run hears instead of being ended by them, as long as it lives; then they are what they were."""

from __future__ import annotations

import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name))
"""What a cluster, or a person, sends before a process has to end."""


class Hearing:
    """Tells `heard`, a method, of each signal; it keeps nobody alive, and signals that are ignored stay so."""

    def __init__(self, heard: Callable[[int], None]) -> None:
        self._heard = weakref.WeakMethod(heard)
        self._before: dict[int, Any] = {}
        self._over = threading.current_thread() is not threading.main_thread()
        for number in () if self._over else SIGNALS:
            before = signal.getsignal(number)
            if before is not None and before is not signal.SIG_IGN:
                self._before[number] = before
                signal.signal(number, self)

    def __call__(self, number: int, frame: FrameType | None) -> None:
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
        while isinstance(found, Hearing) and found._over:
            found = found._before.get(number)
        return found

    def close(self) -> None:
        """Let signals be what they were, unless somebody has put a handler on top of this one."""
        self._over = True
        if threading.current_thread() is threading.main_thread():
            for number in self._before:
                if signal.getsignal(number) is self:
                    signal.signal(number, self.before(number))
