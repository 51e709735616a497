"""A disk that hangs: work that is watched while it runs, and given up when the disk no longer answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from surefoot.checkpoint.store.failures import SaveFailed
from surefoot.checkpoint.store.files import Files

T = TypeVar("T")


class GivenUp(Exception):
    """The disk answered again after it had been given up: nothing more may be done for this save."""


class Watched(Files):
    """Passes every call on and notes when the last one came back; after `give_up` it passes on nothing more."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.chunk = files.chunk
        self.at = ("begin", Path())
        self.since = time.monotonic()
        self._over = threading.Event()

    def give_up(self) -> None:
        self._over.set()

    def do(self, what: str, path: Path, act: Callable[[], T]) -> T:
        if self._over.is_set():
            raise GivenUp
        self.at, self.since = (what, path), time.monotonic()
        try:
            return self._files.do(what, path, act)
        finally:
            self.since = time.monotonic()

    def free(self, folder: Path) -> int:
        return self._files.free(folder)


def patiently(failure: str, files: Watched, patience: float, work: Callable[[], T]) -> T:
    """Do the work, but wait for no single call longer than `patience` seconds; then SaveFailed, told as `failure`.

    A thread that hangs in the system cannot be ended. When it wakes, it finds that it was given up, and tidies up.
    """
    found: list[T] = []
    errors: list[BaseException] = []
    over = threading.Event()

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            errors.append(error)
        finally:
            over.set()

    threading.Thread(target=run, name="surefoot-save", daemon=True).start()
    while not over.wait(max(0.01, files.since + patience - time.monotonic())):
        if time.monotonic() - files.since >= patience:
            files.give_up()
            what, path = files.at
            raise SaveFailed(
                f"{failure}: the disk has not answered for {patience:g} s ({what} {path})",
                kind="hangs",
            )
    if errors:
        raise errors[0]
    return found[0]
