"""A trial that stands still is ended, and the place where it stands is named."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable

from surefoot.train.check.stack import own_line

_LOOKS = 20
"""How often the clock is looked at, within the patience."""


class Watchdog:
    """Calls `hung` with words, from a thread of its own, once nothing has happened for `patience` seconds."""

    def __init__(self, patience: float, hung: Callable[[str], None]) -> None:
        self._patience, self._hung = patience, hung
        self._main = threading.get_ident()
        self._ended = threading.Event()
        self._what, self._last = "the start", time.monotonic()
        self.longest = 0.0
        """Seconds of the longest pause so far."""

    def beat(self, what: str) -> None:
        """Something has happened; `what` comes next."""
        now = time.monotonic()
        self.longest = max(self.longest, now - self._last)
        self._what, self._last = what, now

    def __enter__(self) -> Watchdog:
        threading.Thread(target=self._look, name="surefoot-watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _look(self) -> None:
        while not self._ended.wait(self._patience / _LOOKS):
            still = time.monotonic() - self._last
            if still > self._patience:
                self._hung(f"nothing has happened for {still:.0f} s in {self._what}; it stands at {self._place()}")
                return

    def _place(self) -> str:
        frame = sys._current_frames().get(self._main)
        return own_line(traceback.extract_stack(frame) if frame is not None else [])
