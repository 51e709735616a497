"""Finds and kills processes that outlive the tests: after each test module, at the end, and when pytest is killed.

Every process of a test run inherits the same marker in its environment, also across sessions, as under torchrun. A
watchdog process kills all processes with that marker when pytest itself has been killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

MARK = "SUREFOOT_TEST_RUN"
GRACE = 10.0
"""Seconds that a process has to end by itself."""
HELPERS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver", b"torch/_inductor/compile_worker")
"""Started once per Python process, by Python and torch themselves, and ended with it."""
_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1


def supported() -> bool:
    return sys.platform == "linux" and _PROC.joinpath("self", "environ").exists()


def command_of(pid: int) -> bytes:
    """The command line of a process; empty when it has ended."""
    try:
        return b" ".join(_PROC.joinpath(str(pid), "cmdline").read_bytes().split(b"\0")).strip()
    except OSError:
        return b""


def _parents() -> dict[int, int]:
    """The parent of each running process; zombies are left out."""
    parents: dict[int, int] = {}
    for pid in (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[:2]
            if state not in (b"Z", b"X"):
                parents[pid] = int(parent)
    return parents


def descendants(root: int) -> set[int]:
    """The children of a process and their children, as long as none in between has ended."""
    parents, tree = _parents(), {root}
    while more := {pid for pid, parent in parents.items() if parent in tree} - tree:
        tree |= more
    return tree - {root}


def marked(mark: str) -> set[int]:
    """The processes with this marker in their environment, or with one that starts with it."""
    prefix, pids = f"{MARK}={mark}".encode(), set()
    for pid in _parents():
        with contextlib.suppress(OSError):
            variables = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
            if any(variable.startswith(prefix) for variable in variables):
                pids.add(pid)
    return pids - {os.getpid()}


def gone(look: Callable[[], Iterable[int]], seconds: float = GRACE) -> list[str]:
    """Wait for processes to end by themselves, kill those that do not, and return their command lines."""
    until = time.monotonic() + seconds
    if set(look()):
        gc.collect()  # a loader in a reference cycle ends its workers only when it is collected
    while left := set(look()):
        if time.monotonic() > until:
            command_lines = [f"{pid}: {command_of(pid).decode(errors='replace')[:300]}" for pid in sorted(left)]
            kill(look)
            return command_lines
        time.sleep(0.05)
    return []


def kill(look: Callable[[], Iterable[int]], seconds: float = GRACE) -> None:
    """Kill until no process is found: one that is killed may have started another just before."""
    until = time.monotonic() + seconds
    while (left := set(look())) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


@contextlib.contextmanager
def started(command: list[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process that is killed on exit with all its descendants, also those in other sessions."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            tree = descendants(process.pid) if supported() else set()
            process.kill()
            born = {pid: _born(pid) for pid in tree}
            kill(lambda: {pid for pid, when in born.items() if when is not None and _born(pid) == when})


def run(command: list[str], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` that also kills all descendants on a timeout."""
    pipe = subprocess.PIPE
    with started(command, stdout=pipe, stderr=pipe, text=True, **options) as process:
        out, error = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(command, process.returncode, out, error)


def _born(pid: int) -> bytes | None:
    """Start time of a process; None when it has ended."""
    try:
        fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields[19]


class Watch:
    """The processes that one pytest process has started."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.mark = f"{run}-{os.getpid()}"
        os.environ[MARK] = self.mark
        # A forked child that does not exec has no environment of its own that could carry the marker.
        os.register_at_fork(before=self._about_to_fork, after_in_child=self._forked)
        self._prctl, self._parent = ctypes.CDLL(None).prctl, os.getpid()

    def _about_to_fork(self) -> None:
        self._parent = os.getpid()

    def _forked(self) -> None:
        self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self._parent:  # the parent is already gone
            os._exit(1)

    def end(self) -> None:
        os.environ.pop(MARK, None)

    def left(self) -> set[int]:
        """Its processes that still run, without this process's own helpers."""
        pids = descendants(os.getpid()) | marked(self.mark)
        return {pid for pid in pids if not any(helper in command_of(pid) for helper in HELPERS)}


class MainWatch(Watch):
    """The same for the main pytest process, which also covers the xdist workers."""

    def __init__(self) -> None:
        super().__init__(uuid.uuid4().hex)
        bare = {name: value for name, value in os.environ.items() if name != MARK}
        devnull = subprocess.DEVNULL
        command = [sys.executable, "-S", "-E", str(Path(__file__).resolve()), str(os.getpid()), self.run]
        self._watchdog = subprocess.Popen(
            command, env=bare, stdin=devnull, stdout=devnull, stderr=devnull, start_new_session=True
        )

    def left(self) -> set[int]:
        return super().left() - {self._watchdog.pid}

    def left_by_all(self) -> set[int]:
        """Processes of the test run that still run."""
        helpers = {pid for pid in descendants(os.getpid()) if any(variable in command_of(pid) for variable in HELPERS)}
        return (descendants(os.getpid()) | marked(self.run)) - {self._watchdog.pid} - helpers

    def end(self) -> None:
        super().end()
        self._watchdog.kill()
        self._watchdog.wait()


def watch(parent: int, run: str) -> None:
    """The watchdog: when pytest has died without stopping it, kill every marked process."""
    while os.getppid() == parent:
        time.sleep(0.5)
    kill(lambda: marked(run))


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2])
