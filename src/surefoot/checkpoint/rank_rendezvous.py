"""Coordinates the ranks that write one checkpoint together, through small files in the checkpoint folder.

A background save must not wait in a collective, which would hang as soon as one rank has failed. Instead, rank 0
publishes the folder to write to; every other rank publishes that it has started and later which files it wrote; at the
end rank 0 publishes the result. All ranks decide alike, without communication, after which attempt they save; a rank
that cannot, because its previous save is still running, publishes that.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from surefoot.checkpoint.store import FileEntry, SaveFailed

START_TIMEOUT = 60.0
"""Seconds to wait for another rank to start: ranks are at most a few steps apart, or one of them has died."""
WRITE_TIMEOUT = 600.0
"""Seconds to wait for a rank that has started, which may have a slower disk."""
_LEAVE_TIMEOUT = 2.0
_POLL = 0.02
_MAX_RESULTS = 100
_PREFIX = ".together-"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The ranks of a run, and a token they agreed on, so that files of an earlier run are not mistaken for theirs."""

    rank: int = 0
    world_size: int = 1
    token: str = "alone"


class SaveRendezvous:
    """One save of a rank group, identified by a number that all ranks count alike."""

    def __init__(self, root: Path, group: RankGroup, number: int) -> None:
        self._root = root
        self._group = group
        self._number = number
        self._name = f"{_PREFIX}{group.token}-{number}"
        self._results_file = root / f"{_PREFIX}{group.token}.over"

    def agree_on_replicated(self, hashes: Mapping[str, str]) -> frozenset[str]:
        """Called by all ranks: the names whose hashes are the same on every rank."""
        if self._group.rank > 0:
            self._root.mkdir(parents=True, exist_ok=True)
            self._publish(f"{self._group.rank}.here", {"hashes": dict(hashes)})
            message = self._await_message("alike", "rank 0 to start", START_TIMEOUT)
            if "failed" in message:
                raise SaveFailed(f"rank 0 could not start: {message['failed']}")
            return frozenset(map(str, message["alike"]))
        others = [
            self._await_message(f"{rank}.here", f"rank {rank} to start", START_TIMEOUT).get("hashes", {})
            for rank in range(1, self._group.world_size)
        ]
        replicated = [name for name, digest in hashes.items() if all(other.get(name) == digest for other in others)]
        self._root.mkdir(parents=True, exist_ok=True)
        self._publish("alike", {"alike": replicated})
        return frozenset(replicated)

    def announce_folder(self, folder: Path) -> None:
        """Called by rank 0: publish the folder to write to."""
        for file in self._root.glob(f"{_PREFIX}{self._group.token}-*"):
            if not file.name.startswith(f"{self._name}."):  # of an earlier save
                with suppress(OSError):
                    file.unlink()
        self._publish("folder", {"folder": folder.name})

    def await_folder(self) -> Path:
        """Called by the other ranks: wait for the folder to write to."""
        self._root.mkdir(parents=True, exist_ok=True)
        self._publish(f"{self._group.rank}.here", {})
        message = self._await_message("folder", "rank 0 to start", START_TIMEOUT)
        if "failed" in message:
            raise SaveFailed(f"rank 0 could not start: {message['failed']}")
        name = str(message["folder"])
        if "/" in name or name in ("", ".", ".."):
            raise SaveFailed(f"rank 0 announced the folder {name!r}, which is not inside {self._root}", kind="damaged")
        return self._root / name

    def report_written(self, entries: Mapping[str, FileEntry]) -> None:
        """Called by the other ranks: publish what was written, then wait for the result of the save."""
        self._publish(str(self._group.rank), {"files": {name: [e.size, e.xxh3_128] for name, e in entries.items()}})
        error = self._poll_until(self._result, "rank 0 to finish", WRITE_TIMEOUT)
        with suppress(OSError):
            self._path(str(self._group.rank)).unlink()  # tells `leave` that this rank has read the result
        if error:
            raise SaveFailed(error)

    def report_failure(self, reason: str) -> None:
        """Called by any rank, in place of its next message."""
        first = self._group.rank == 0
        with suppress(OSError):
            if not first:
                self._publish(f"{self._group.rank}.here", {})
            self._publish("folder" if first else str(self._group.rank), {"failed": reason})

    def collect_written(self) -> dict[str, FileEntry]:
        """Called by rank 0: wait for the files that all other ranks wrote."""
        entries: dict[str, FileEntry] = {}
        for rank in range(1, self._group.world_size):
            self._await_message(f"{rank}.here", f"rank {rank} to start", START_TIMEOUT)
        for rank in range(1, self._group.world_size):
            message = self._await_message(str(rank), f"rank {rank}", WRITE_TIMEOUT)
            if "failed" in message:
                raise SaveFailed(f"rank {rank} could not write its part: {message['failed']}")
            files = dict(message["files"])
            entries |= {name: FileEntry(int(size), str(digits)) for name, (size, digits) in files.items()}
        return entries

    def publish_result(self, error: str = "") -> None:
        """Called by rank 0; results stay for a while, because other ranks may look for them late."""
        latest = sorted(self._all_results().items(), key=lambda item: int(item[0]))[-_MAX_RESULTS:]
        with suppress(OSError):
            _write(self._results_file, {**dict(latest), str(self._number): error})

    def _result(self) -> str | None:
        return self._all_results().get(str(self._number))

    def _all_results(self) -> dict[str, str]:
        with suppress(OSError, ValueError):
            return dict(json.loads(self._results_file.read_text()))
        return {}

    def _path(self, name: str) -> Path:
        return self._root / f"{self._name}.{name}"

    def _publish(self, name: str, message: Mapping[str, Any]) -> None:
        _write(self._path(name), message)

    def _await_message(self, name: str, waiting_for: str, timeout: float) -> dict[str, Any]:
        path = self._path(name)

        def read() -> dict[str, Any] | None:
            with suppress(OSError, ValueError):
                return dict(json.loads(path.read_text()))
            result = self._result() if self._group.rank else None
            return None if result is None else {"failed": result or "the save finished without this rank"}

        return self._poll_until(read, waiting_for, timeout)

    def _poll_until(self, read: Callable[[], T | None], waiting_for: str, timeout: float) -> T:
        deadline = time.monotonic() + timeout
        while (value := read()) is None:
            if time.monotonic() > deadline:
                raise SaveFailed(
                    f"waited {timeout:.0f} s for {waiting_for}. Is it still running, and do all ranks write to the"
                    " same disk?"
                )
            time.sleep(_POLL)
        return value


def _write(path: Path, message: Mapping[str, Any]) -> None:
    draft = path.with_name(path.name + ".new")
    draft.write_text(json.dumps(message))
    os.replace(draft, path)


def leave(root: Path, group: RankGroup) -> None:
    """Called by rank 0 at the end: remove its messages once the other ranks have read them, or after 2 s."""
    if group.world_size == 1 or group.rank > 0:
        return
    deadline = time.monotonic() + _LEAVE_TIMEOUT
    names = [f"{_PREFIX}{group.token}-*.{rank}" for rank in range(1, group.world_size)]
    while time.monotonic() < deadline and any(file for name in names for file in root.glob(name)):
        time.sleep(_POLL)
    remove_messages(root, group.token)


def remove_messages(root: Path, token: str = "") -> None:
    """Remove the messages of earlier runs, or of one token."""
    for file in root.glob(f"{_PREFIX}{token}*"):
        with suppress(OSError):
            file.unlink()
