"""One live writer per run directory, also across hosts, using only plain files that any network disk supports.

The lock is a file created with O_EXCL that its owner keeps rewriting. An owner on this host is alive if its process
is, one elsewhere if the file changes while we watch: clocks of two hosts are never compared. A dead owner's lock is
taken over in two moves: take `writer.lock.heir-...`, a lock of the same kind that only one contender can hold and whose
name is a hash of the dead lock's bytes; then, if the lock still has those bytes, rename the heir over it.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from surefoot.journal.row_file import AppendFile
from surefoot.process_identity import is_running, pid_scope, start_time

_SIZE = 512
_ACQUIRE_ATTEMPTS = 20


class RunDirectoryInUse(ValueError):
    """Another process is writing to this run directory."""


class WriterLock:
    """The right to write to one run directory: `acquire`, `refresh` every `interval` seconds, `release`."""

    def __init__(self, run_dir: Path, *, interval: float = 2.0, watch: int = 3) -> None:
        self.path = run_dir / "writer.lock"
        self.interval = interval
        self._watch = watch
        self._pid = os.getpid()
        self._beats = 0
        self._record = {
            **pid_scope(),
            "pid": self._pid,
            "start": start_time(self._pid),
            "token": secrets.token_hex(8),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
            "interval": interval,
        }

    def acquire(self) -> WriterLock:
        """Take the lock, waiting only to see whether an owner on another host is alive; raises RunDirectoryInUse."""
        for _ in range(_ACQUIRE_ATTEMPTS):
            if self._take(self.path):
                # Left by contenders that died; a live one finds our lock instead of the dead one and gives up.
                for heir in self.path.parent.glob(self.path.name + ".heir-*"):
                    heir.unlink(missing_ok=True)
                return self
        raise RunDirectoryInUse(
            f"{self.path} changed owner {_ACQUIRE_ATTEMPTS} times while we tried to take it; choose another run_dir"
        )

    def is_held(self) -> bool:
        """Whether the lock on disk is the one we took."""
        return _owner(_read(self.path)).get("token") == self._record["token"]

    def refresh(self) -> bool:
        """Rewrite the lock to show that we are alive; False if it was taken over or removed: then stop writing."""
        try:
            fd = os.open(self.path, os.O_RDWR | getattr(os, "O_BINARY", 0))
        except FileNotFoundError:
            return False
        try:
            # Read and write the same open file: if it is renamed away in between, we do not touch another's lock.
            if _owner(os.read(fd, 2 * _SIZE)).get("token") != self._record["token"]:
                return False
            self._beats += 1
            os.lseek(fd, 0, os.SEEK_SET)
            os.write(fd, self._bytes())
        finally:
            os.close(fd)  # closing is what sends a write to the server of a network disk
        return True

    def release(self) -> None:
        """Remove the lock if it is ours; in a forked child it is not."""
        if os.getpid() == self._pid and self.is_held():
            self.path.unlink(missing_ok=True)

    def _take(self, path: Path) -> bool:
        """Own `path`; False if it changed meanwhile and must be examined again."""
        if self._create(path):
            return True
        content = _read(path)
        if content is None:
            return False
        if self._alive(path, content):
            raise RunDirectoryInUse(self._refusal(_owner(_read(path) or content)))
        heir = path.with_name(f"{path.name}.heir-{hashlib.sha256(content).hexdigest()[:12]}")
        if not self._take(heir):
            return False
        try:
            if _read(path) == content:
                os.replace(heir, path)
                return _owner(_read(path)).get("token") == self._record["token"]
            heir.unlink()
        except FileNotFoundError:  # we were slow, and another contender took us for dead
            pass
        return False

    def _create(self, path: Path) -> bool:
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            return False
        file = AppendFile(path)
        try:
            file.write(self._bytes())
        except OSError:
            path.unlink(missing_ok=True)
            raise
        finally:
            file.close()
        return True

    def _bytes(self) -> bytes:
        return json.dumps(self._record | {"beats": self._beats}).encode("ascii").ljust(_SIZE - 1) + b"\n"

    def _alive(self, path: Path, content: bytes) -> bool:
        owner = _owner(content)
        if all(owner.get(key) == value for key, value in pid_scope().items()):
            alive = is_running(owner.get("pid"), owner.get("start"))
            if alive is not None:
                return alive
        interval = owner.get("interval")
        interval = max(self.interval, min(interval, 60.0)) if isinstance(interval, int | float) else self.interval
        deadline = time.monotonic() + interval * self._watch
        while time.monotonic() < deadline:
            time.sleep(interval / 8)
            current = _read(path)
            if current != content:
                return current is not None
        return False

    def _refusal(self, owner: dict[str, Any]) -> str:
        who = f"process {owner.get('pid', '?')} on {owner.get('host', 'an unknown host')}"
        stop = "stop that process"
        if owner.get("pid") == self._pid and all(owner.get(key) == value for key, value in pid_scope().items()):
            who, stop = f"this very process ({self._pid})", "close its journal first"
        return (
            f"{self.path.parent} is in use: {who} has been writing to it since {owner.get('since', 'an unknown time')}."
            f" Choose another run_dir, or {stop}; if you are sure that no process writes there, delete {self.path}"
        )


SEEN_RECENTLY = 60.0
"""Seconds since a lock was last rewritten within which its owner on another host counts as alive."""


def read_owner(run_dir: Path) -> dict[str, Any]:
    """What the lock of a run directory says of its writer; empty if there is no lock."""
    return _owner(_read(run_dir / "writer.lock"))


def owner_is_running(owner: dict[str, Any]) -> bool | None:
    """Whether the writer runs, if it is on this host; None where only its heartbeat, the field `beats`, can tell."""
    if all(owner.get(key) == value for key, value in pid_scope().items()):
        return is_running(owner.get("pid"), owner.get("start"))
    return None


def writer_is_alive(run_dir: Path) -> bool:
    """Whether a process is writing to this run directory, for readers that do not wait to see the lock change.

    On another host it shows only in how old the lock is, by the clock of the file system.
    """
    owner = read_owner(run_dir)
    if not owner:
        return False
    alive = owner_is_running(owner)
    if alive is not None:
        return alive
    try:
        return time.time() - (run_dir / "writer.lock").stat().st_mtime < SEEN_RECENTLY
    except OSError:
        return False


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _owner(content: bytes | None) -> dict[str, Any]:
    try:
        owner = json.loads(content or b"")
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}
