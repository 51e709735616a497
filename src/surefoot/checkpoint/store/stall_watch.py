"""Detects a disk that hangs: calls are timed while they run, and a save is abandoned when one of them stalls."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar, cast

from surefoot.checkpoint.store.failures import SaveFailed
from surefoot.checkpoint.store.files import Files

T = TypeVar("T")
_CHUNK = 1 << 25


class WriteAbandoned(Exception):
    """The disk responded again after the save was abandoned: no further call may be made for it."""


class WatchedFiles(Files):
    """Forwards every call and records when the last one returned; after `abandon` it forwards none."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.chunk = files.chunk
        self.last_call = ("begin", Path())
        self.since = time.monotonic()
        self._abandoned = threading.Event()

    def abandon(self) -> None:
        self._abandoned.set()

    def do(self, what: str, path: Path, act: Callable[[], T]) -> T:
        if self._abandoned.is_set():
            raise WriteAbandoned
        self.last_call, self.since = (what, path), time.monotonic()
        try:
            return self._files.do(what, path, act)
        finally:
            self.since = time.monotonic()

    def free(self, folder: Path) -> int:
        return self._files.free(folder)


def run_with_stall_timeout(failure: str, files: WatchedFiles, stall_timeout: float, work: Callable[[], T]) -> T:
    """Run `work` in a thread; raise SaveFailed, with a message that begins with `failure`, once a call has stalled.

    A thread that hangs in a system call cannot be ended. When it wakes up, its next call raises WriteAbandoned and it
    cleans up.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    finished = threading.Event()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        finally:
            finished.set()

    threading.Thread(target=run, name="surefoot-save", daemon=True).start()
    while not finished.wait(max(0.01, files.since + stall_timeout - time.monotonic())):
        if time.monotonic() - files.since >= stall_timeout:
            files.abandon()
            what, path = files.last_call
            raise SaveFailed(
                f"{failure}: checkpoint write has stalled for {stall_timeout:g} s ({what} {path})",
                kind="hangs",
            )
    if errors:
        raise errors[0]
    return results[0]


class WriteWatch:
    """Times the file call that is in progress, if any."""

    def __init__(self) -> None:
        self._started: float | None = None

    def call_started(self) -> None:
        self._started = time.monotonic()

    def call_ended(self) -> None:
        self._started = None

    @property
    def stalled_seconds(self) -> float:
        """Seconds since the current call started; 0 when none is in progress."""
        started = self._started
        return 0.0 if started is None else time.monotonic() - started


class WatchedFile:
    """A new file for tensors; each call goes through `Files.do` and is timed by a WriteWatch."""

    def __init__(self, path: Path, files: Files, watch: WriteWatch) -> None:
        self._path, self._files, self._watch = path, files, watch
        self._file: Any = self._do("create", lambda: path.open("xb", buffering=0))

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        rest = view
        while len(rest):
            rest = rest[self._write(rest[:_CHUNK]) :]
        return len(view)

    def _write(self, chunk: memoryview) -> int:
        return self._do("write", lambda: self._file.write(chunk))

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
        self._watch.call_started()
        try:
            return self._files.do(what, self._path, act)
        finally:
            self._watch.call_ended()


def watched_opener(files: Files, watch: WriteWatch) -> Callable[[Path], BinaryIO]:
    """A function that creates WatchedFiles."""
    return lambda path: cast(BinaryIO, WatchedFile(path, files, watch))
