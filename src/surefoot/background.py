"""Work in background threads, and an interpreter that waits for it before it exits."""

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
"""Seconds that an exiting process waits for work under way; work on a disk may hang for ever."""
_GLOO_THREAD = "(pt_gloo_runloop) "
"""Name of gloo's threads in /proc/self/task/*/stat, followed by their state."""
_GLOO_WAIT = 2.0
"""Seconds that an exiting process waits for those, at most; they need a few milliseconds."""


class ProcessExiting(Exception):
    """The process is about to exit, so the work in progress is no longer needed."""


class _RunningWork:
    """Counts the threads that are working, so that the process exits only after them.

    A thread that returns from C++ after the interpreter is gone crashes the process: a training that went well would
    end like one that crashed.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._count = 0
        self.exiting = False
        atexit.register(self._exit)  # at import, so that handlers registered later run before this one
        os.register_at_fork(after_in_child=self._forked)

    def run(self, work: Callable[[], None]) -> bool:
        """Run `work` and return True, or return False if the process is exiting."""
        with self._changed:
            if self.exiting:
                return False
            self._count += 1
        try:
            work()
        finally:
            with self._changed:
                self._count -= 1
                self._changed.notify_all()
        return True

    def _exit(self) -> None:
        with self._changed:
            self.exiting = True
            self._changed.wait_for(lambda: not self._count, timeout=EXIT_WAIT)
        _wait_for_gloo()

    def _forked(self) -> None:
        """A child process has none of its parent's threads."""
        self._changed, self._count = threading.Condition(), 0


_running = _RunningWork()


def run_unless_exiting(work: Callable[[], None]) -> bool:
    """Run `work` in this thread, and have the exit of the process wait for it; False if the process is exiting."""
    return _running.run(work)


def raise_if_exiting() -> None:
    """Raise `ProcessExiting` if the process is exiting; to be called now and then in long work."""
    if _running.exiting:
        raise ProcessExiting


def _wait_for_gloo() -> None:
    """Wait until gloo's threads have released the tensors they exchanged last.

    They outlive `destroy_process_group` wherever something still refers to the group, even a default argument in torch
    itself. To free a tensor that Python has seen they need the interpreter; if that is gone by then, a training that
    went well ends with SIGABRT.
    """
    until, quiet = time.monotonic() + _GLOO_WAIT, 0
    while (working := _gloo_working()) is not None and quiet < 3 and time.monotonic() < until:
        quiet = 0 if working else quiet + 1
        time.sleep(0.001)  # releases the GIL, which they need


def _gloo_working() -> bool | None:
    """Whether a thread of gloo is working, as far as the system shows it; None where there is no such thread."""
    working: bool | None = None
    for task in Path("/proc/self/task").glob("*/stat"):  # Linux only
        with contextlib.suppress(OSError):  # the thread has just ended
            _, is_gloo, state = task.read_text(errors="replace").partition(_GLOO_THREAD)
            if is_gloo:
                working = bool(working) or not state.startswith("S")
    return working


class BackgroundTask(Generic[T]):
    """Work with one result, run exactly once: by the thread it was submitted to, or by whoever needs it first."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._lock = threading.Lock()
        self._result: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        """Run the work, or wait for the thread that is running it."""
        with self._lock:
            work, self._work = self._work, None
            if work is None:
                return
            try:
                self._result.append(work())
            except BaseException as error:
                self._error = error

    @property
    def done(self) -> bool:
        """Whether the result is there."""
        return self._work is None and not self._lock.locked()

    def result(self) -> T:
        """The result of the work; raises its error."""
        self.run()
        if self._error is not None:
            raise self._error
        return self._result[0]


class BackgroundWorker:
    """A thread that runs tasks in order; it starts with the first task and ends with its owner."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        weakref.finalize(self, self._queue.put, None)

    def submit(self, work: Callable[[], T]) -> BackgroundTask[T]:
        """Queue `work` and return at once."""
        if self._thread is None or not self._thread.is_alive():  # the first time, or in the child of a fork
            self._thread = threading.Thread(target=_serve, args=(self._queue,), name=self._name, daemon=True)
            self._thread.start()
        task = BackgroundTask(work)
        self._queue.put(task.run)
        return task


def _serve(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    while (work := queue.get()) is not None and _running.run(work):
        del work  # it keeps alive what it worked on
