"""Work that is done behind the training's back, and is there when it is asked for."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")
EXIT_WAIT = 60.0
"""Seconds that the end of a process waits for work that is under way; that on a disk may hang for ever."""
_GLOO = "(pt_gloo_runloop) "
"""What the system calls the threads in which torch exchanges tensors of the host, before it tells what they do."""
_LET_GO = 2.0
"""Seconds that the end of a process waits for those, at most; they need a few thousandths."""


class ProcessExiting(Exception):
    """The process is about to end, and what was being made is of no use to anybody any more."""


class _AtWork:
    """How many threads are in the middle of something. One that comes back from C++ when the interpreter is gone takes
    the process down with it: a training that is over would end as if it had crashed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._busy = 0
        self.ending = False
        atexit.register(self._end)  # at once, so that whoever has something to finish at the end comes before this
        os.register_at_fork(after_in_child=self._forked)

    def do(self, work: Callable[[], None]) -> bool:
        """Do it, unless it is too late for that."""
        with self._changed:
            if self.ending:
                return False
            self._busy += 1
        try:
            work()
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()
        return True

    def _end(self) -> None:
        with self._changed:
            self.ending = True
            self._changed.wait_for(lambda: not self._busy, timeout=EXIT_WAIT)
        _let_go()

    def _forked(self) -> None:
        """A child has none of its parent's threads."""
        self._changed, self._busy = threading.Condition(), 0


_at_work = _AtWork()


def run_unless_exiting(work: Callable[[], None]) -> bool:
    """Do it, in a thread of one's own, and have the end of the process wait for it; False: it is too late for that."""
    return _at_work.do(work)


def _let_go() -> None:
    """Wait until the threads of gloo have let go of what they exchanged last.

    They outlive `destroy_process_group` wherever something still knows the group, be it a default argument in torch
    itself. To give back a tensor that Python has known they need the interpreter, and if that is gone by then, a
    training that went well ends with SIGABRT.
    """
    until, quiet = time.monotonic() + _LET_GO, 0
    while (at_work := _gloo_at_work()) is not None and quiet < 3 and time.monotonic() < until:
        quiet = 0 if at_work else quiet + 1
        time.sleep(0.001)  # meanwhile the interpreter is theirs


def _gloo_at_work() -> bool | None:
    """Whether a thread of gloo is doing something, as far as the system tells; None where there is no such thread."""
    found: bool | None = None
    for task in Path("/proc/self/task").glob("*/stat"):  # elsewhere than on Linux there are none
        with contextlib.suppress(OSError):  # it has just ended
            _, is_gloo, state = task.read_text(errors="replace").partition(_GLOO)
            if is_gloo:
                found = bool(found) or not state.startswith("S")
    return found


def raise_if_exiting() -> None:
    """To be called now and then in the midst of long work that only serves what comes after it."""
    if _at_work.ending:
        raise ProcessExiting


class BackgroundTask(Generic[T]):
    """A piece of work with one result, done exactly once: by the thread it was sent to, or by whoever asks first."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._lock = threading.Lock()
        self._found: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work, or wait for whoever is at it."""
        with self._lock:
            work, self._work = self._work, None
            if work is None:
                return
            try:
                self._found.append(work())
            except BaseException as error:
                self._error = error

    @property
    def done(self) -> bool:
        """Whether the result is there."""
        return self._work is None and not self._lock.locked()

    def result(self) -> T:
        """What came of it; an error of the work is raised here."""
        self.run()
        if self._error is not None:
            raise self._error
        return self._found[0]


class BackgroundWorker:
    """A thread that does errands in the order they come; it starts with the first and ends with its owner."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        weakref.finalize(self, self._queue.put, None)

    def submit(self, work: Callable[[], T]) -> BackgroundTask[T]:
        """Have it done as soon as the interpreter has a moment to spare; returns at once."""
        if self._thread is None or not self._thread.is_alive():  # the first time, or in a child of a fork
            self._thread = threading.Thread(target=_serve, args=(self._queue,), name=self._name, daemon=True)
            self._thread.start()
        errand = BackgroundTask(work)
        self._queue.put(errand.run)
        return errand


def _serve(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := queue.get()) is not None and _at_work.do(work):
        del work  # it holds what it worked on
