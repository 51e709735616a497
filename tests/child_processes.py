"""No process outlives the tests: looked for after each test module and at the end, and killed with a killed pytest.

Every process that a test run starts carries the same mark in its environment, and hands it on to what it starts itself,
into other sessions too, as torchrun does. A watchdog outside kills all that carry it when pytest was killed.
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
"""Seconds in which a process that was told to end may do so."""
HELPERS = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver", b"torch/_inductor/compile_worker")
"""Started once for a whole Python process, by Python and torch themselves, and ended with it."""
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
    """The parent of each process that runs; the dead that nobody has waited for are left out."""
    parents: dict[int, int] = {}
    for pid in (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()[:2]
            if state not in (b"Z", b"X"):
                parents[pid] = int(parent)
    return parents


def descendants(root: int) -> set[int]:
    """The processes that this one started, and what they started, as long as none in between has ended."""
    parents, found = _parents(), {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {root}


def marked(mark: str) -> set[int]:
    """The processes that were started with this mark in their environment, or one that begins so."""
    wanted, found = f"{MARK}={mark}".encode(), set()
    for pid in _parents():
        with contextlib.suppress(OSError):
            variables = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
            if any(each.startswith(wanted) for each in variables):
                found.add(pid)
    return found - {os.getpid()}


def gone(look: Callable[[], Iterable[int]], seconds: float = GRACE) -> list[str]:
    """Wait for processes to end by themselves, kill those that do not, and tell which these were."""
    until = time.monotonic() + seconds
    if set(look()):
        gc.collect()  # a loader in a cycle of references ends its workers only when it is collected
    while left := set(look()):
        if time.monotonic() > until:
            told = [f"{pid}: {command_of(pid).decode(errors='replace')[:300]}" for pid in sorted(left)]
            kill(look)
            return told
        time.sleep(0.05)
    return []


def kill(look: Callable[[], Iterable[int]], seconds: float = GRACE) -> None:
    """Kill what is found until nothing is: what is killed may have started another just before."""
    until = time.monotonic() + seconds
    while (left := set(look())) and time.monotonic() < until:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


@contextlib.contextmanager
def started(command: list[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process that is killed at the end with all that it has started, also in sessions of their own."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            tree = descendants(process.pid) if supported() else set()
            process.kill()
            born = {pid: _born(pid) for pid in tree}
            kill(lambda: {pid for pid, when in born.items() if when is not None and _born(pid) == when})


def run(command: list[str], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of which nothing is left when the time is over."""
    pipe = subprocess.PIPE
    with started(command, stdout=pipe, stderr=pipe, text=True, **options) as process:
        out, error = process.communicate(timeout=timeout)
    return subprocess.CompletedProcess(command, process.returncode, out, error)


def _born(pid: int) -> bytes | None:
    """When a process began; None when it has ended."""
    try:
        words = (_PROC / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if words[0] in (b"Z", b"X") else words[19]


class Watch:
    """What one pytest process has started."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.mark = f"{run}-{os.getpid()}"
        os.environ[MARK] = self.mark
        # A process that is forked and runs on in this program has no environment of its own to be marked.
        os.register_at_fork(before=self._about_to_fork, after_in_child=self._forked)
        self._prctl, self._parent = ctypes.CDLL(None).prctl, os.getpid()

    def _about_to_fork(self) -> None:
        self._parent = os.getpid()

    def _forked(self) -> None:
        self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != self._parent:  # it was killed before
            os._exit(1)

    def end(self) -> None:
        os.environ.pop(MARK, None)

    def left(self) -> set[int]:
        """What still runs of it, without the helpers of this process itself."""
        found = descendants(os.getpid()) | marked(self.mark)
        return {pid for pid in found if not any(helper in command_of(pid) for helper in HELPERS)}


class Owner(Watch):
    """The same for the pytest process that was typed, which also answers for those of xdist."""

    def __init__(self) -> None:
        super().__init__(uuid.uuid4().hex)
        bare = {name: value for name, value in os.environ.items() if name != MARK}
        nothing = subprocess.DEVNULL
        command = [sys.executable, "-S", "-E", str(Path(__file__).resolve()), str(os.getpid()), self.run]
        self._watchdog = subprocess.Popen(
            command, env=bare, stdin=nothing, stdout=nothing, stderr=nothing, start_new_session=True
        )

    def left(self) -> set[int]:
        return super().left() - {self._watchdog.pid}

    def left_by_all(self) -> set[int]:
        """What still runs of the whole test run."""
        helpers = {pid for pid in descendants(os.getpid()) if any(each in command_of(pid) for each in HELPERS)}
        return (descendants(os.getpid()) | marked(self.run)) - {self._watchdog.pid} - helpers

    def end(self) -> None:
        super().end()
        self._watchdog.kill()
        self._watchdog.wait()


def watch(parent: int, run: str) -> None:
    """The watchdog: when pytest has ended without having ended it, kill what carries the mark."""
    while os.getppid() == parent:
        time.sleep(0.5)
    kill(lambda: marked(run))


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2])
