"""Which process is meant, and whether it still runs: on this host, or not to be told from here."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def place() -> dict[str, str]:
    """Where process numbers mean the same: one host, one boot of it, one process namespace (container)."""
    place = {"host": socket.gethostname(), "boot": "", "namespace": ""}
    try:
        place["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        place["namespace"] = os.readlink("/proc/self/ns/pid")
    except OSError:
        pass
    return place


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if it has ended or the system does not tell."""
    try:
        # The name of the program, in parentheses, may itself hold spaces and parentheses.
        words = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if words[0] in (b"Z", b"X") else int(words[19])
    except (OSError, ValueError, IndexError):
        return None


def running(pid: object, start: object) -> bool | None:
    """Whether the process that began at `start` runs here; None where the system does not tell."""
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
    # It exists, yet no start time: a zombie, unless /proc is closed to us.
    return False if Path(f"/proc/{pid}/stat").exists() else None
