"""A file that is written through the store's door to the disk, so that every call can be watched, or fail in a test."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

from surefoot.checkpoint.store.files import Files

_PIECE = 1 << 25


class Pulse:
    """When a disk last answered; None while nobody asks it for anything, or somebody else watches it."""

    def __init__(self) -> None:
        self._asked: float | None = None

    def asks(self) -> None:
        self._asked = time.monotonic()

    def rests(self) -> None:
        self._asked = None

    @property
    def silent(self) -> float:
        """Seconds for which a call has not come back."""
        asked = self._asked
        return 0.0 if asked is None else time.monotonic() - asked


class Opened:
    """A new file; each call goes through `Files.do` and is felt by the pulse."""

    def __init__(self, path: Path, files: Files, pulse: Pulse) -> None:
        self._path, self._files, self._pulse = path, files, pulse
        self._file: Any = self._do("create", lambda: path.open("xb", buffering=0))

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        rest = view
        while len(rest):
            rest = rest[self._write(rest[:_PIECE]) :]
        return len(view)

    def _write(self, piece: memoryview) -> int:
        return self._do("write", lambda: self._file.write(piece))

    def flush(self) -> None:
        self._do("flush", lambda: os.fsync(self._file.fileno()))

    def fileno(self) -> int:
        return self._file.fileno()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _do(self, what: str, act: Any) -> Any:
        self._pulse.asks()
        try:
            return self._files.do(what, self._path, act)
        finally:
            self._pulse.rests()


def opener(files: Files, pulse: Pulse) -> Any:
    """What makes such files."""
    return lambda path: cast(BinaryIO, Opened(path, files, pulse))
