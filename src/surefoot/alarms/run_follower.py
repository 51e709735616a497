"""Follows a run directory by reading what its writer appends; never writes."""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surefoot.journal.aliases import upgraded_event
from surefoot.journal.row_file import BadHeader, load_rows
from surefoot.journal.run_json import SIGNALS_DIR
from surefoot.journal.segments import list_segments
from surefoot.journal.strict_json import loads_object
from surefoot.process_identity import is_running, pid_scope

_EVENTS = re.compile(r"events(?:-rank\d+)?\.jsonl")
_LOCK = "writer.lock"
_MAX_READ = 4 << 20
"""Bytes read from one file at once; of a longer past, only the end is read."""
_MISSED_BEATS = 15
"""A writer on another host that has not rewritten its lock for so many of its intervals is gone."""


@dataclass(slots=True)
class _Tail:
    """How far one file was read."""

    inode: int
    offset: int
    rest: bytes = b""
    """The beginning of a line whose end is not written yet."""


class EventTails:
    """The new events of all ranks, each time it is asked."""

    def __init__(self, run_dir: Path, *, since: float) -> None:
        self._run_dir, self._since = run_dir, since
        self._tails: dict[str, _Tail] = {}

    def read(self) -> list[dict[str, Any]]:
        """In the order of each file; events from before `since` are left out."""
        events = []
        for path in sorted(p for p in _entries(self._run_dir) if _EVENTS.fullmatch(p.name)):
            for line in self._lines(path):
                event = loads_object(line) if line.strip() else None
                if event is not None and _time_of(event) >= self._since:
                    events.append(upgraded_event(_COMMON | event))
        return events

    def _lines(self, path: Path) -> Iterator[bytes]:
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                tail = self._tails.get(path.name)
                if tail is None or tail.inode != status.st_ino or status.st_size < tail.offset:
                    start = max(0, status.st_size - _MAX_READ)
                    tail = self._tails[path.name] = _Tail(status.st_ino, start)
                file.seek(tail.offset)
                data = file.read(_MAX_READ)
        except OSError:
            return
        tail.offset += len(data)
        *lines, tail.rest = (tail.rest + data).split(b"\n")
        yield from lines


@dataclass(frozen=True, slots=True)
class LastRow:
    """The newest row of a run."""

    step: int
    attempt: int
    loss: float


class LastSteps:
    """The newest row, and since when there was no newer one, by the clock of who watches."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / SIGNALS_DIR
        self._size = (-1, -1)
        self.row: LastRow | None = None
        self.seen_at = time.monotonic()

    def look(self, now: float) -> bool:
        """Whether there are newer rows than at the last look."""
        try:
            files = list_segments(self._folder, "scalars")
            size = (len(files), files[-1].path.stat().st_size) if files else (0, 0)
            if size == self._size:
                return False
            self._size = size
            for row in load_rows(files[-1].path, last=1)[1] if files else ():
                self.row = LastRow(int(row["step"]), int(row["attempt"]), float(row["loss"]))
        except (OSError, BadHeader, ValueError, KeyError):
            return False
        self.seen_at = now
        return True

    def in_words(self) -> str:
        if self.row is None:
            return "it had made no step"
        loss = "" if math.isnan(self.row.loss) else f", loss {self.row.loss:.4g}"
        return f"last step {self.row.step}{loss}"


@dataclass(slots=True)
class WriterSign:
    """Whether the process that writes to a run directory is alive."""

    run_dir: Path
    _content: bytes = b""
    _changed_at: float = field(default_factory=time.monotonic)

    def alive(self, now: float) -> bool | None:
        """None where the directory has no writer: its run has ended, or has not begun."""
        try:
            content = (self.run_dir / _LOCK).read_bytes()
        except OSError:
            return None
        if content != self._content:
            self._content, self._changed_at = content, now
        try:
            owner = json.loads(content)
            interval = float(owner.get("interval", 2.0))
        except (ValueError, AttributeError, TypeError):
            return True  # being written
        if all(owner.get(key) == value for key, value in pid_scope().items()):
            running = is_running(owner.get("pid"), owner.get("start"))
            if running is not None:
                return running
        return now - self._changed_at < _MISSED_BEATS * min(max(interval, 1.0), 60.0)

    @property
    def owner(self) -> str:
        """The process that wrote last, in words."""
        try:
            owner = json.loads(self._content)
            return f"process {owner['pid']} on {owner['host']}"
        except (ValueError, KeyError, TypeError):
            return "the process"


_COMMON = {"kind": "note", "step": -1, "attempt": -1, "rank": 0, "time": 0.0}


def _time_of(event: dict[str, Any]) -> float:
    value = event.get("time")
    return float(value) if isinstance(value, int | float) else math.inf


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
