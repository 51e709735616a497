"""How far the reading has come: told to whoever watches, which is nobody unless a terminal shows it."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, BinaryIO, cast

Watcher = Callable[[str, int, int], None]
"""Is told the path, how many bytes were read since last time, and how many there are in all."""

_watcher: ContextVar[Watcher | None] = ContextVar("surefoot-reading", default=None)


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """While this is open, whoever reads a file tells how far it has come."""
    before = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(before)


def watched(stream: BinaryIO, path: str) -> BinaryIO:
    """The stream itself, or one that tells how far it has come when somebody wants to know."""
    watcher = _watcher.get()
    return stream if watcher is None else cast(BinaryIO, io.BufferedReader(_Watched(stream, path, watcher), 1 << 18))


def counted(path: str) -> Callable[[int, int], None] | None:
    """What work that counts its bytes itself calls with those done so far and those in all; None if nobody watches."""
    watcher = _watcher.get()
    if watcher is None:
        return None
    before = 0

    def tell(done: int, size: int) -> None:
        nonlocal before
        watcher(path, done - before, size)
        before = done

    return tell


class _Watched(io.RawIOBase):
    def __init__(self, stream: BinaryIO, path: str, watcher: Watcher) -> None:
        self._stream, self._path, self._watcher = stream, path, watcher
        self._size = os.fstat(stream.fileno()).st_size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        data = self._stream.read(len(buffer)) or b""
        buffer[: len(data)] = data
        self._watcher(self._path, len(data), self._size)
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()
