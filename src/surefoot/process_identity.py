"""Identifies a process beyond its pid, and tells whether it still runs."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path


def pid_scope() -> dict[str, str]:
    """Where a pid means the same process: one host, one boot of it, one pid namespace (container)."""
    scope = {"host": socket.gethostname(), "boot": "", "namespace": ""}
    try:
        scope["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        scope["namespace"] = os.readlink("/proc/self/ns/pid")
    except OSError:
        pass
    return scope


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if it has ended or the system does not say."""
    try:
        # The name of the program, in parentheses, may itself contain spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, ValueError, IndexError):
        return None


def is_running(pid: object, start: object) -> bool | None:
    """Whether the process that started at `start` runs on this host; None where the system does not say."""
    if not isinstance(pid, int) or not isinstance(start, int) or start_time(os.getpid()) is None:
        return None
    now = start_time(pid)
    if now is not None:
        return now == start
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it exists, but /proc hides other users' processes
        return None
    # It exists, yet has no start time: a zombie, unless we may not read /proc.
    return False if Path(f"/proc/{pid}/stat").exists() else None


_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Kill this process as soon as `parent`, the process that started it, has ended for whatever reason.

    Linux sends the signal when the thread that started us ends, so a parent must start us in a thread that waits for
    us. On other systems a thread checks the parent twice a second.
    """
    if not (sys.platform == "linux" and ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0):
        threading.Thread(target=_end_without, args=(parent,), name="surefoot-parent", daemon=True).start()
    if os.getppid() != parent:  # it ended before the signal was set up
        os._exit(1)


def _end_without(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
