"""A log judged while it grows: speaks when trouble comes, once for each."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import numpy as np

from surefoot.logs.answer import Answer, State
from surefoot.logs.following.tail import FileTail, PipeTail
from surefoot.logs.following.voice import Firm, Voice
from surefoot.logs.reading.source import Source
from surefoot.logs.showing.axes import telling
from surefoot.logs.table import ENDING, MOST, Column, Table, Unreadable

SMALL = 1 << 24
"""Bytes up to which a log is read again as a whole; of a larger one only what is new is read."""
LINES = frozenset({"jsonl", "csv", "tsv", "text"})
"""Formats of which a part can be read by itself."""
QUIET = 2.0
"""Seconds after which a last line without an end is taken for whole."""
PATIENCE = 120.0
"""Seconds of silence after which no more is expected: what was only feared is said."""
OFTEN, SHARE = 1.0, 12.0
"""Judged at most once in so many seconds, and once in so many times of what judging takes."""

Judge = Callable[[Table], Answer]
Reader = Callable[[Source], list[Table]]


class Log(Protocol):
    """A log that may have grown since it was last asked."""

    @property
    def ended(self) -> bool: ...

    def grown(self) -> bool: ...

    def answer(self, *, quiet: bool) -> Answer | None: ...

    def close(self) -> None: ...


class Growing:
    """A log of lines: kept whole while it is small, later as the numbers that were read from it."""

    def __init__(self, tail: FileTail | PipeTail, path: str, read: Reader, judge: Judge) -> None:
        self._tail, self._path, self._read, self._judge = tail, path, read, judge
        self.again = 0
        """How often the file was replaced by another."""
        self._start_anew()

    def _start_anew(self) -> None:
        self._bytes = bytearray()
        self._head = b""
        self._table: Table | None = None

    @property
    def ended(self) -> bool:
        return self._tail.ended

    def grown(self) -> bool:
        """Take in what is new, all that is there."""
        any_new = False
        while True:
            data, fresh = self._tail.read()
            if fresh:
                self._start_anew()
                self.again += 1
            self._bytes += data
            any_new |= bool(data) or fresh
            if len(self._bytes) > SMALL:
                self._fold()
            if not data:
                return any_new

    def answer(self, *, quiet: bool) -> Answer | None:
        """What is to be said by now; None while there is nothing to judge by."""
        if self._table is not None and len(self._bytes) > SMALL // 16:
            self._fold()
        whole = bytes(self._bytes) if quiet else _whole_lines(self._bytes)
        table = self._table
        if whole.strip():
            read = self._tables(whole)
            table = _joined(table, read) if read is not None else table
        return None if table is None else self._judge(table)

    def close(self) -> None:
        self._tail.close()

    def _fold(self) -> None:
        """Keep the numbers of the whole lines so far, and drop their text."""
        whole = _whole_lines(self._bytes)
        if not whole:
            del self._bytes[:-SMALL]  # one line without an end: nothing that anybody could read
            return
        table = self._tables(whole)
        if table is not None and table.format not in LINES:
            raise Unreadable(
                f"{self._path} is {table.format} of more than {SMALL >> 20} MiB, which cannot be followed."
                " Judge it from time to time with: surefoot diagnose"
            )
        if table is not None:
            self._table = _joined(self._table, table)
            if not self._head and table.format in ("csv", "tsv"):
                self._head = whole[: whole.index(b"\n") + 1] if b"\n" in whole else b""
        del self._bytes[: len(whole)]

    def _tables(self, data: bytes) -> Table | None:
        """The table of these lines; the names of the columns of a CSV stand in its first."""
        try:
            with Source(io.BytesIO(self._head + data), self._path) as source:
                tables = self._read(source)
        except Unreadable:
            return None  # nothing to read yet, or a part without numbers
        return max(tables, key=lambda table: table.records, default=None)


class Rereading:
    """A folder, or a file that is written as a whole each time: read again when it changed."""

    ended = False

    def __init__(self, path: str, judge: Callable[[str], Answer]) -> None:
        self._path, self._judge = path, judge
        self._seen: object = None

    def grown(self) -> bool:
        now = _state(Path(self._path))
        changed, self._seen = now != self._seen, now
        return changed

    def answer(self, *, quiet: bool) -> Answer | None:
        try:
            return self._judge(self._path)
        except Unreadable:
            return None  # caught in the middle of being written

    def close(self) -> None:
        """Nothing is held open."""


def _state(path: Path) -> object:
    """Sizes and times of all files; another means that something was written."""
    try:
        files = sorted(path.rglob("*"))[:10_000] if path.is_dir() else [path]
        return tuple((str(file), now.st_size, now.st_mtime_ns) for file in files if (now := file.stat()))
    except OSError:
        return None


def _whole_lines(data: bytearray) -> bytes:
    """Up to the last end of a line; bars end theirs with a carriage return."""
    return bytes(data[: max(data.rfind(b"\n"), data.rfind(b"\r")) + 1])


def _joined(first: Table | None, second: Table) -> Table:
    """Two parts of one log as one table."""
    if first is None:
        return second
    columns = dict(first.columns)
    for name, column in second.columns.items():
        later = Column(column.rows + first.records, column.values)
        columns[name] = _appended(columns[name], later) if name in columns else later
    skipped = {
        why: first.skipped.get(why, 0) + second.skipped.get(why, 0) for why in {**first.skipped, **second.skipped}
    }
    return replace(
        second,
        records=first.records + second.records,
        columns=columns,
        skipped=skipped,
        notes=tuple(dict.fromkeys((*first.notes, *second.notes))),
        ending=(first.ending + second.ending)[-ENDING:],
        facts={**first.facts, **second.facts},
    )


def _appended(first: Column, second: Column) -> Column:
    rows, values = np.concatenate([first.rows, second.rows]), np.concatenate([first.values, second.values])
    if len(values) > MOST:
        kept = telling(values, MOST // 2)
        rows, values = rows[kept], values[kept]
    return Column(rows, values)


def follow(
    log: Log,
    *,
    speak: Callable[[Answer], None],
    until: frozenset[State],
    timeout: float | None = None,
    poll: float = 0.5,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Answer | None:
    """Judge a log as it grows, until it has a verdict of `until`, ends, or is silent for too long; the last answer."""
    voice, firm = Voice(), Firm()
    answer: Answer | None = None
    heard, due, waiting = clock(), clock(), False
    judged_quiet, over = True, False
    while True:
        now = clock()
        if log.grown():
            heard, waiting, judged_quiet = now, True, False
        quiet = log.ended or now - heard >= QUIET
        judged = (waiting and now >= due) or log.ended or (quiet and not judged_quiet and now >= due)
        if judged:
            started = clock()
            answer = log.answer(quiet=quiet) or answer
            waiting, judged_quiet = False, quiet
            due = now + max(OFTEN, SHARE * (clock() - started))
        before, over = over, log.ended or now - heard >= PATIENCE
        if answer is not None and (judged or over > before) and firm.believes(answer, quiet=quiet, over=over):
            if voice.news(answer):
                speak(answer)
            if answer.verdict in until:
                return answer
        if log.ended or (timeout is not None and now - heard >= timeout):
            return answer
        sleep(poll)


def opened(path: str, *, columns: Mapping[str, str]) -> Log:
    """The right way to follow what is at a path; waits for nothing."""
    from surefoot.logs.diagnosing import diagnose

    def judge(source: Table | str) -> Answer:
        return diagnose(source, columns=columns or None)

    if path == "-":
        return Growing(PipeTail(sys.stdin.buffer), path, _read, judge)
    if os.path.isdir(path) or _written_whole(path):
        return Rereading(path, judge)
    return Growing(FileTail(path), path, _read, judge)


def _read(source: Source) -> list[Table]:
    """The tables in bytes at hand; JSON or CSV that turns out to be none is text."""
    from surefoot.logs.reading import door
    from surefoot.logs.reading.console import textlog

    kind = door.kind_of(source.head)
    reader = next((one for one in door.READERS if kind == one.FORMAT), textlog)
    found = reader.read(source)
    return found if isinstance(found, list) else [found]


def _written_whole(path: str) -> bool:
    """Whether a file is of a format that is not written line by line: a JSON document, an event file, a checkpoint."""
    from surefoot.logs.reading import door

    if not os.path.isfile(path) or not os.path.getsize(path):
        return False
    try:
        with Source.open(path) as source:
            kind = door.kind_of(source.head)
            if kind not in LINES:
                return True
        return os.path.getsize(path) < SMALL and all(one.format not in LINES for one in door.read_file(path))
    except Unreadable:
        return False
