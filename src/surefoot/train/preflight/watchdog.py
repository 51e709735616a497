"""Detects a hung trial and names the line of code where it hangs."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

_CHECKS_PER_PATIENCE = 20
_LIBRARY_FOLDERS = (str(Path(__file__).parents[2]), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))
"""Full paths of surefoot and the standard library: a user's own folder may have the same name."""
_LIBRARY_PARTS = ("site-packages", "dist-packages", "<frozen", "<string>")

_WAITS_FOR_WORKERS = "_try_get_data"
"""The method of torch's and torchdata's loaders in which they wait for their worker processes."""


class Watchdog:
    """Calls `on_hang` with a message, from its own thread, when there was no `beat` for `patience` seconds."""

    def __init__(self, patience: float, on_hang: Callable[[str], None]) -> None:
        self._patience, self._on_hang = patience, on_hang
        self._main_thread = threading.get_ident()
        self._done = threading.Event()
        self._phase, self._last_beat = "the start", time.monotonic()
        self.longest_pause = 0.0
        """Seconds."""

    def beat(self, phase: str) -> None:
        """Progress was made; `phase` is what comes next."""
        now = time.monotonic()
        self.longest_pause = max(self.longest_pause, now - self._last_beat)
        self._phase, self._last_beat = phase, now

    def __enter__(self) -> Watchdog:
        threading.Thread(target=self._watch, name="surefoot-watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def _watch(self) -> None:
        while not self._done.wait(self._patience / _CHECKS_PER_PATIENCE):
            idle = time.monotonic() - self._last_beat
            if idle > self._patience:
                self._on_hang(f"no progress for {idle:.0f} s in {self._phase}; it hangs at {self._current_line()}")
                return

    def _current_line(self) -> str:
        frame = sys._current_frames().get(self._main_thread)
        stack = traceback.extract_stack(frame) if frame is not None else []
        if any(call.name == _WAITS_FOR_WORKERS for call in stack):
            return "a process that reads data; check with data.workers=0 to see the line"
        return user_line(stack)


def user_line(stack: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line outside of libraries; the innermost of all if there is none."""
    user_frames = [frame for frame in stack if not _in_library(frame.filename)]
    for frame in reversed(user_frames or stack):
        return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return "an unknown line"


def _in_library(file: str) -> bool:
    return any(part in file for part in _LIBRARY_PARTS) or any(file.startswith(f + os.sep) for f in _LIBRARY_FOLDERS)
