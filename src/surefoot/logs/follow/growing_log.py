"""New bytes of a log as they come: of a file that grows, is cut, rotated or replaced, or of a pipe. // Logs that grow: of lines, of which only what is new is read, and of files that are written as a whole each time."""

from __future__ import annotations

import io
import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from surefoot.logs.formats.console import console_log
from surefoot.logs.formats.console.plain_text import decode_lines
from surefoot.logs.formats.detect import describe_known_binary
from surefoot.logs.formats.log_source import LogSource, is_compressed
from surefoot.logs.log_diagnosis import LogDiagnosis, UnreadableInput
from surefoot.logs.report.axes import shape_indices
from surefoot.logs.table import MAX_TAIL_CHARS, MAX_VALUES_PER_COLUMN, LogColumn, LogTable, TableBuilder

CHUNK_BYTES = 1 << 22
"""Bytes taken at once."""


class FileTail:
    """Like `tail -F`: goes on with the new file when the old one was put aside."""

    ended = False

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._file: BinaryIO | None = None
        self._file_id = (0, 0)

    def read(self) -> tuple[bytes, bool]:
        """What is new, and whether it is the start of another file than before."""
        if self._file is None:
            return self._open(), False
        data = self._file.read(CHUNK_BYTES)
        if data:
            return data, False
        try:
            now = self._path.stat()
        except OSError:
            return b"", False  # put aside; the next one is not there yet
        if (now.st_dev, now.st_ino) == self._file_id and now.st_size >= self._file.tell():
            return b"", False
        self.close()
        return self._open(), True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> bytes:
        try:
            self._file = self._path.open("rb")
            now = os.fstat(self._file.fileno())
            self._file_id = (now.st_dev, now.st_ino)
            return self._file.read(CHUNK_BYTES)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise UnreadableInput(f"{self._path} cannot be read: {error.strerror or error}") from None


class PipeTail:
    """What is piped in; a thread reads it, so that nobody waits for a pipe that is silent."""

    def __init__(self, stream: BinaryIO) -> None:
        self.ended = False
        self._pieces: queue.Queue[bytes] = queue.Queue(maxsize=16)
        self._stream = stream
        threading.Thread(target=self._pump, name="surefoot-pipe", daemon=True).start()

    def read(self) -> tuple[bytes, bool]:
        parts: list[bytes] = []
        while not self.ended and sum(map(len, parts)) < CHUNK_BYTES:
            try:
                piece = self._pieces.get_nowait()
            except queue.Empty:
                break
            self.ended = not piece
            parts.append(piece)
        return b"".join(parts), False

    def close(self) -> None:
        """The pipe is its owner's to close."""

    def _pump(self) -> None:
        take = getattr(self._stream, "read1", self._stream.read)
        try:
            while piece := take(1 << 16):
                self._pieces.put(piece)
        except (OSError, ValueError):
            pass  # closed from the other side, or by us at the end
        self._pieces.put(b"")


MAX_REREAD_BYTES = 1 << 24
"""Bytes up to which a log is read again as a whole; of a larger one only what is new is read."""
LINE_FORMATS = frozenset({"jsonl", "csv", "tsv", "text"})
"""Formats of which a part can be read by itself."""

Judge = Callable[[LogTable], LogDiagnosis]
Reader = Callable[[LogSource], list[LogTable]]


class ConsoleStream:
    """Console text whose reader is kept from one piece to the next, as a row may stand on lines of both."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._gatherer = TableBuilder()
        self._following = console_log.ConsoleParser(self._gatherer)

    def feed(self, data: bytes) -> None:
        for text in self._texts(data):
            self._following.feed(text)

    def table(self, rest: bytes) -> LogTable:
        """All rows so far, and those that would come if the log ended with `rest`."""
        ahead = self._following.fork()
        rows = [row for text in self._texts(rest) for row in ahead.feed(text)] + ahead.finish()
        more = TableBuilder()
        for row in rows:
            more.add(row)
        table = self._gatherer.build(console_log.FORMAT, self._path)
        # The gatherer's arrays cannot grow while somebody holds them.
        columns = {name: LogColumn(one.rows.copy(), one.values.copy()) for name, one in table.columns.items()}
        joined = _join_tables(replace(table, columns=columns), more.build(console_log.FORMAT, self._path))
        return replace(joined, tail=ahead.tail[-MAX_TAIL_CHARS:], settings=ahead.settings)

    def _texts(self, data: bytes) -> Iterator[str]:
        with LogSource(io.BytesIO(data), self._path) as source:
            yield from decode_lines(source.chunks())


class GrowingLog:
    """A log of lines: kept whole while it is small, later as the numbers that were read from it."""

    def __init__(self, tail: FileTail | PipeTail, path: str, read: Reader, judge: Judge) -> None:
        self._tail, self._path, self._read, self._judge = tail, path, read, judge
        self.again = 0
        """How often the file was replaced by another."""
        self._reset()

    def _reset(self) -> None:
        self._bytes = bytearray()
        self._head = b""
        self._table: LogTable | None = None
        self._console: ConsoleStream | None = None

    @property
    def ended(self) -> bool:
        return self._tail.ended

    def grown(self) -> bool:
        """Take in what is new, all that is there."""
        any_new = False
        while True:
            data, fresh = self._tail.read()
            if fresh:
                self._reset()
                self.again += 1
            self._bytes += data
            any_new |= bool(data) or fresh
            if data and self._table is None and self._console is None:
                self._check_can_follow()
            if len(self._bytes) > MAX_REREAD_BYTES or self._console is not None:
                self._compact()
            if not data:
                return any_new

    def answer(self, *, quiet: bool) -> LogDiagnosis | None:
        """What is to be said by now; None while there is nothing to judge by."""
        if self._console is not None:
            return self._judge(self._console.table(bytes(self._bytes) if quiet else b""))
        if self._table is not None and len(self._bytes) > MAX_REREAD_BYTES // 16:
            self._compact()
        whole = bytes(self._bytes) if quiet else _whole_lines(self._bytes)
        table = self._table
        if whole.strip():
            read = self._read_lines(whole)
            table = _join_tables(table, read) if read is not None else table
        return None if table is None else self._judge(table)

    def close(self) -> None:
        self._tail.close()

    def _compact(self) -> None:
        """Keep the numbers of the whole lines so far, and drop their text."""
        whole = _whole_lines(self._bytes)
        if not whole:
            del self._bytes[:-MAX_REREAD_BYTES]  # one line without an end: nothing that anybody could read
            return
        if self._console is not None:
            self._console.feed(whole)
            del self._bytes[: len(whole)]
            return
        table = self._read_lines(whole)
        if table is not None and table.format not in LINE_FORMATS:
            raise UnreadableInput(
                f"{self._path} is {table.format} of more than {MAX_REREAD_BYTES >> 20} MiB, which cannot be followed."
                " Judge it from time to time with: surefoot diagnose"
            )
        if table is not None and self._table is None and table.format == console_log.FORMAT:
            self._console = ConsoleStream(self._path)
            self._console.feed(whole)
        elif table is not None:
            self._table = _join_tables(self._table, table)
            if not self._head and table.format in ("csv", "tsv"):
                self._head = whole[: whole.index(b"\n") + 1] if b"\n" in whole else b""
        del self._bytes[: len(whole)]

    def _check_can_follow(self) -> None:
        """Says at once what will never be a log of lines."""
        if is_compressed(self._bytes):
            raise UnreadableInput(
                f"{self._path} is compressed and cannot be followed: what is in it is there only once it is closed."
                " Follow the log before it is packed, or judge this with: surefoot diagnose"
            )
        if told := describe_known_binary(bytes(self._bytes[:512])):
            raise UnreadableInput(f"{self._path} {told}")

    def _read_lines(self, data: bytes) -> LogTable | None:
        """The table of these lines; the names of the columns of a CSV stand in its first."""
        try:
            with LogSource(io.BytesIO(self._head + data), self._path) as source:
                tables = self._read(source)
        except UnreadableInput:
            return None  # nothing to read yet, or a part without numbers
        return max(tables, key=lambda table: table.records, default=None)


class RereadLog:
    """A folder, or a file that is written as a whole each time: read again when it changed."""

    ended = False

    def __init__(self, path: str, judge: Callable[[str], LogDiagnosis]) -> None:
        self._path, self._judge = path, judge
        self._seen: object = None

    def grown(self) -> bool:
        now = _file_state(Path(self._path))
        changed, self._seen = now != self._seen, now
        return changed

    def answer(self, *, quiet: bool) -> LogDiagnosis | None:
        try:
            return self._judge(self._path)
        except UnreadableInput:
            return None  # caught in the middle of being written

    def close(self) -> None:
        """Nothing is held open."""


def _file_state(path: Path) -> object:
    """Sizes and times of all files; another means that something was written."""
    try:
        files = sorted(path.rglob("*"))[:10_000] if path.is_dir() else [path]
        return tuple((str(file), now.st_size, now.st_mtime_ns) for file in files if (now := file.stat()))
    except OSError:
        return None


def _whole_lines(data: bytearray) -> bytes:
    """Up to the last end of a line; bars end theirs with a carriage return."""
    return bytes(data[: max(data.rfind(b"\n"), data.rfind(b"\r")) + 1])


def _join_tables(first: LogTable | None, second: LogTable) -> LogTable:
    """Two parts of one log as one table."""
    if first is None:
        return second
    columns = dict(first.columns)
    for name, column in second.columns.items():
        later = LogColumn(column.rows + first.records, column.values)
        columns[name] = _append_columns(columns[name], later) if name in columns else later
    skipped = {
        why: first.skipped.get(why, 0) + second.skipped.get(why, 0) for why in {**first.skipped, **second.skipped}
    }
    return replace(
        second,
        records=first.records + second.records,
        columns=columns,
        skipped=skipped,
        notes=tuple(dict.fromkeys((*first.notes, *second.notes))),
        tail=(first.tail + second.tail)[-MAX_TAIL_CHARS:],
        settings={**first.settings, **second.settings},
    )


def _append_columns(first: LogColumn, second: LogColumn) -> LogColumn:
    rows, values = np.concatenate([first.rows, second.rows]), np.concatenate([first.values, second.values])
    if len(values) > MAX_VALUES_PER_COLUMN:
        kept = shape_indices(values, MAX_VALUES_PER_COLUMN // 2)
        rows, values = rows[kept], values[kept]
    return LogColumn(rows, values)
