"""How far a long piece of work has come: a bar in a terminal, now and then a line elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[int], None]
_LONG = 32 << 20
"""Bytes below which it is not worth a word."""
_SECONDS = 30.0


@contextmanager
def progress(total: int, what: str) -> Iterator[Advance]:
    """Call what it yields with the bytes that were done; it tells on standard error."""
    if total < _LONG:
        yield lambda _: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn(what), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total)
            yield lambda size: bar.advance(task, size)
    else:
        yield _Lines(total, what)


class _Lines:
    def __init__(self, total: int, what: str) -> None:
        self._total, self._what, self._done = total, what, 0
        self._told = time.monotonic()

    def __call__(self, size: int) -> None:
        self._done += size
        if time.monotonic() - self._told >= _SECONDS:
            self._told = time.monotonic()
            print(
                f"{self._what}: {self._done / self._total:.0%} of {self._total >> 20} MB", file=sys.stderr, flush=True
            )
