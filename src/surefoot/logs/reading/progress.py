"""How far the reading has come: told to whoever watches, which is nobody unless a terminal shows it."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, BinaryIO, cast

ProgressCallback = Callable[[str, int, int], None]
"""Is told the path, how many bytes were read since last time, and how many there are in all."""

_callback: ContextVar[ProgressCallback | None] = ContextVar("surefoot-reading", default=None)


@contextmanager
def report_progress(watcher: ProgressCallback) -> Iterator[None]:
    """While this is open, whoever reads a file tells how far it has come."""
    before = _callback.set(watcher)
    try:
        yield
    finally:
        _callback.reset(before)


def with_progress(stream: BinaryIO, path: str) -> BinaryIO:
    """The stream itself, or one that tells how far it has come when somebody wants to know."""
    watcher = _callback.get()
    return stream if watcher is None else cast(BinaryIO, io.BufferedReader(_ProgressStream(stream, path, watcher), 1 << 18))


def progress_counter(path: str) -> Callable[[int, int], None] | None:
    """What work that counts its bytes itself calls with those done so far and those in all; None if nobody watches."""
    watcher = _callback.get()
    if watcher is None:
        return None
    before = 0

    def tell(done: int, size: int) -> None:
        nonlocal before
        watcher(path, done - before, size)
        before = done

    return tell


class _ProgressStream(io.RawIOBase):
    def __init__(self, stream: BinaryIO, path: str, watcher: ProgressCallback) -> None:
        self._stream, self._path, self._callback = stream, path, watcher
        self._size = os.fstat(stream.fileno()).st_size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        data = self._stream.read(len(buffer)) or b""
        buffer[: len(data)] = data
        self._callback(self._path, len(data), self._size)
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()
