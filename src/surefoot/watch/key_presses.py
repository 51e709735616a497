"""The keys of `surefoot watch`: reading them from a terminal, and what each does to the view."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from surefoot.watch.screen import SCALES, ScreenView

_SEQUENCES = {
    b"\x1b[A": "up", b"\x1b[B": "down", b"\x1bOA": "up", b"\x1bOB": "down", b"\x1b[5~": "page up",
    b"\x1b[6~": "page down", b"\x1b": "escape", b"\r": "enter", b"\n": "enter",
}  # fmt: skip
_PANEL_KEYS = {
    "g": "layers", "e": "events", "r": "runs", "?": "help", "h": "help", "o": "overview", "escape": "overview",
}  # fmt: skip
_MOVES = {"up": -1, "k": -1, "down": 1, "j": 1, "page up": -10, "page down": 10}


@dataclass(frozen=True, slots=True)
class KeyResult:
    """The view after a key, and what the loop has to do."""

    view: ScreenView
    quit: bool = False
    open_run: bool = False
    """Show the run that is selected."""


def press(key: str, view: ScreenView, *, runs: int) -> KeyResult:
    """The effect of a key; an unknown one has none."""
    if key in ("q", "Q"):
        return KeyResult(view, quit=True)
    if key == "enter" and view.panel == "runs":
        return KeyResult(replace(view, panel="overview", scroll=0), open_run=True)
    if key == "l":
        view = replace(view, scale=SCALES[(SCALES.index(view.scale) + 1) % len(SCALES)])
    elif key in _PANEL_KEYS:
        panel = _PANEL_KEYS[key]
        view = replace(view, panel="overview" if view.panel == panel else panel, scroll=0)
    elif key in _MOVES:
        view = _moved(view, _MOVES[key], runs)
    return KeyResult(view)


def _moved(view: ScreenView, by: int, runs: int) -> ScreenView:
    if view.panel == "runs":
        return replace(view, selected=max(0, min(runs - 1, view.selected + by)))
    if view.panel == "events":  # counted back from the newest
        by = -by
    return replace(view, scroll=max(0, view.scroll + by))


@contextlib.contextmanager
def key_mode() -> Iterator[None]:
    """Keys arrive one by one and are not printed; the terminal is restored however this ends."""
    try:
        import termios
        import tty
    except ImportError:  # not a POSIX system: there Ctrl+C is the only key
        yield
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def read_keys(timeout: float) -> list[str]:
    """The keys pressed within `timeout` seconds; returns at the first. A closed terminal reads as q."""
    fd = sys.stdin.fileno()
    if not select.select([fd], [], [], timeout)[0]:
        return []
    data = os.read(fd, 1024)
    return split_keys(data) if data else ["q"]


def split_keys(data: bytes) -> list[str]:
    """Names of the keys in what a terminal has sent."""
    keys = []
    while data:
        sequence = next((known for known in sorted(_SEQUENCES, key=len, reverse=True) if data.startswith(known)), b"")
        keys.append(_SEQUENCES[sequence] if sequence else data[:1].decode("latin-1"))
        data = data[len(sequence) or 1 :]
    return keys
