"""Logs that grow: line formats, of which only new bytes are read, and files or folders that are read again."""

from __future__ import annotations

import io
import os
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from surefoot.logs.formats.console import console_log
from surefoot.logs.formats.console.plain_text import decode_lines
from surefoot.logs.formats.detect import describe_known_binary
from surefoot.logs.formats.join_pieces import join_tables
from surefoot.logs.formats.log_source import LogSource, is_compressed
from surefoot.logs.log_diagnosis import LogDiagnosis, UnreadableInput
from surefoot.logs.report.axes import shape_indices
from surefoot.logs.table import MAX_TAIL_CHARS, MAX_VALUES_PER_COLUMN, LogColumn, LogTable, TableBuilder

CHUNK_BYTES = 1 << 22
"""Bytes read at once."""


class FileTail:
    """Like `tail -F`: continues with the new file when the old one was rotated or replaced."""

    ended = False

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._file: BinaryIO | None = None
        self._file_id = (0, 0)

    def read(self) -> tuple[bytes, bool]:
        """The new bytes, and whether they start a new file."""
        if self._file is None:
            return self._open(), False
        data = self._file.read(CHUNK_BYTES)
        if data:
            return data, False
        try:
            now = self._path.stat()
        except OSError:
            return b"", False  # rotated; the new file does not exist yet
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
    """Reads a pipe in a thread, so that a silent pipe blocks nobody."""

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
        """Does nothing: the pipe belongs to the caller."""

    def _pump(self) -> None:
        take = getattr(self._stream, "read1", self._stream.read)
        try:
            while piece := take(1 << 16):
                self._pieces.put(piece)
        except (OSError, ValueError):
            pass  # closed by either side
        self._pieces.put(b"")


MAX_REREAD_BYTES = 1 << 24
"""Larger logs are not read again; only what is new is read."""
LINE_FORMATS = frozenset({"jsonl", "csv", "tsv", "nanogpt", "text"})
"""Formats of which a part can be read on its own."""

Judge = Callable[[LogTable], LogDiagnosis]
Reader = Callable[[LogSource], list[LogTable]]


class ConsoleStream:
    """Console text whose parser is kept between chunks, as a row may span both."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._gatherer = TableBuilder()
        self._following = console_log.ConsoleParser(self._gatherer)

    def feed(self, data: bytes) -> None:
        for text in self._texts(data):
            self._following.feed(text)

    def table(self, rest: bytes) -> LogTable:
        """All rows so far, and those that would follow if the log ended with `rest`."""
        ahead = self._following.fork()
        rows = [row for text in self._texts(rest) for row in ahead.feed(text)] + ahead.finish()
        more = TableBuilder()
        for row in rows:
            more.add(row)
        table = self._gatherer.build(console_log.FORMAT, self._path)
        # The builder's arrays cannot grow while they are referenced.
        columns = {name: LogColumn(column.rows.copy(), column.values.copy()) for name, column in table.columns.items()}
        joined = _join_thinned(replace(table, columns=columns), more.build(console_log.FORMAT, self._path))
        return replace(joined, tail=ahead.tail[-MAX_TAIL_CHARS:], settings=ahead.settings)

    def _texts(self, data: bytes) -> Iterator[str]:
        with LogSource(io.BytesIO(data), self._path) as source:
            yield from decode_lines(source.chunks())


class GrowingLog:
    """A log of lines: kept as text while it is small, later as the numbers read from it."""

    def __init__(self, tail: FileTail | PipeTail, path: str, read: Reader, judge: Judge) -> None:
        self._tail, self._path, self._read, self._judge = tail, path, read, judge
        self.again = 0
        """How often the file was replaced."""
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
        """Read all that is new; returns whether there was anything."""
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

    def diagnose(self, *, quiet: bool) -> LogDiagnosis | None:
        """The diagnosis so far; None while there is nothing to diagnose."""
        if self._console is not None:
            return self._judge(self._console.table(bytes(self._bytes) if quiet else b""))
        if self._table is not None and len(self._bytes) > MAX_REREAD_BYTES // 16:
            self._compact()
        whole = bytes(self._bytes) if quiet else _whole_lines(self._bytes)
        table = self._table
        if whole.strip():
            read = self._read_lines(whole)
            table = _join_thinned(table, read) if read is not None else table
        return None if table is None else self._judge(table)

    def close(self) -> None:
        self._tail.close()

    def _compact(self) -> None:
        """Keep the numbers of the complete lines and drop their text."""
        whole = _whole_lines(self._bytes)
        if not whole:
            del self._bytes[:-MAX_REREAD_BYTES]  # one line without an end: not readable anyway
            return
        if self._console is not None:
            self._console.feed(whole)
            del self._bytes[: len(whole)]
            return
        table = self._read_lines(whole)
        if table is not None and table.format not in LINE_FORMATS:
            raise UnreadableInput(
                f"{self._path} is {table.format} of more than {MAX_REREAD_BYTES >> 20} MiB, which cannot be followed."
                " Diagnose it from time to time with: surefoot diagnose"
            )
        if table is not None and self._table is None and table.format == console_log.FORMAT:
            self._console = ConsoleStream(self._path)
            self._console.feed(whole)
        elif table is not None:
            self._table = _join_thinned(self._table, table)
            if not self._head and table.format in ("csv", "tsv"):
                self._head = whole[: whole.index(b"\n") + 1] if b"\n" in whole else b""
        del self._bytes[: len(whole)]

    def _check_can_follow(self) -> None:
        """Raise at once for what will never be a log of lines."""
        if is_compressed(self._bytes):
            raise UnreadableInput(
                f"{self._path} is compressed and cannot be followed: its content is complete only once it is closed."
                " Follow the log before it is compressed, or diagnose this with: surefoot diagnose"
            )
        if reason := describe_known_binary(bytes(self._bytes[:512])):
            raise UnreadableInput(f"{self._path} {reason}")

    def _read_lines(self, data: bytes) -> LogTable | None:
        """The table of these lines; the column names of a CSV file are in its first."""
        try:
            with LogSource(io.BytesIO(self._head + data), self._path) as source:
                tables = self._read(source)
        except UnreadableInput:
            return None  # nothing to read yet, or no numbers
        return max(tables, key=lambda table: table.records, default=None)


class RereadLog:
    """A folder, or a file that is rewritten as a whole: read again when it changed."""

    ended = False

    def __init__(self, path: str, judge: Callable[[str], LogDiagnosis]) -> None:
        self._path, self._judge = path, judge
        self._seen: object = None

    def grown(self) -> bool:
        now = _file_state(Path(self._path))
        changed, self._seen = now != self._seen, now
        return changed

    def diagnose(self, *, quiet: bool) -> LogDiagnosis | None:
        try:
            return self._judge(self._path)
        except UnreadableInput:
            return None  # it is being written

    def close(self) -> None:
        """Does nothing: no file is open."""


def _file_state(path: Path) -> object:
    """Sizes and times of all files, which change when something is written."""
    try:
        files = sorted(path.rglob("*"))[:10_000] if path.is_dir() else [path]
        return tuple((str(file), now.st_size, now.st_mtime_ns) for file in files if (now := file.stat()))
    except OSError:
        return None


def _whole_lines(data: bytearray) -> bytes:
    """The bytes up to the last line end; progress bars end lines with a carriage return."""
    return bytes(data[: max(data.rfind(b"\n"), data.rfind(b"\r")) + 1])


def _join_thinned(first: LogTable | None, second: LogTable) -> LogTable:
    """Join two parts of one log, in bounded memory."""
    joined = join_tables(first, second)
    return replace(joined, columns={name: _thinned(column) for name, column in joined.columns.items()})


def _thinned(column: LogColumn) -> LogColumn:
    if len(column) <= MAX_VALUES_PER_COLUMN:
        return column
    kept = shape_indices(column.values, MAX_VALUES_PER_COLUMN // 2)
    return LogColumn(column.rows[kept], column.values[kept])
