"""Console output of any trainer: rows are recognised by their names and by the shape of their lines."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

import numpy as np
from numpy.typing import NDArray

from surefoot.logs.formats.console.line_reader import LineReader
from surefoot.logs.formats.console.multiline_rows import Record
from surefoot.logs.formats.console.plain_text import decode_lines, strip_terminal_codes
from surefoot.logs.formats.console.row_builder import RowSink
from surefoot.logs.formats.log_source import LogSource
from surefoot.logs.table import LogTable, TableBuilder

FORMAT = "text"
MAX_LINE_CHARS = 1 << 20
"""Longer text without a newline is split."""
_PART_CHARS = 1 << 16
_CONTROL_BYTES = bytes([*range(1, 7), *range(14, 27), *range(28, 32), 127])


class _RowList:
    """A sink that collects rows in a list."""

    def __init__(self) -> None:
        self.rows: list[Record] = []

    def add(self, record: Mapping[str, float], /) -> None:
        self.rows.append(dict(record))

    def extend(self, columns: Mapping[str, NDArray[np.float64]], present: Mapping[str, NDArray[np.bool_]], /) -> None:
        for values in zip(*(column.tolist() for column in columns.values()), strict=True):
            self.rows.append(dict(zip(columns, values, strict=True)))

    def skip(self, reason: str, count: int = 1, /) -> None:
        pass


class ConsoleParser:
    """Parses text as it arrives: `feed` returns the rows of the complete lines."""

    def __init__(self, sink: RowSink | None = None) -> None:
        self._rows = _RowList()
        self._sink: RowSink = sink if sink is not None else self._rows
        self._lines = LineReader(self._sink)
        self._rest = ""

    @property
    def tail(self) -> str:
        """The text since the last row, which may contain the exception the run ended in."""
        return self._lines.text_since_row.text() + ("\n" + strip_terminal_codes(self._rest) if self._rest else "")

    @property
    def settings(self) -> dict[str, float | str]:
        """Settings found in the text."""
        return self._lines.settings

    def feed(self, text: str) -> list[Record]:
        text = self._rest + text
        cut = max(text.rfind("\n"), text.rfind("\r")) + 1
        if len(text) - cut > MAX_LINE_CHARS:
            text, cut = text + "\n", len(text) + 1
        self._rest = text[cut:]
        body = strip_terminal_codes(text[:cut])
        at = 0
        while at < len(body):
            end = body.find("\n", at + _PART_CHARS) + 1 or len(body)
            self._lines.feed(body[at:end])
            at = end
        return self._take_rows()

    def finish(self) -> list[Record]:
        """Parse the last line even without a newline, and return the rows held back for confirmation."""
        rest, self._rest = self._rest, ""
        for line in strip_terminal_codes(rest).split("\n"):
            self._lines.line(line)
        self._lines.finish()
        return self._take_rows()

    def fork(self) -> ConsoleParser:
        """A copy that continues from here on its own, to see which rows would follow."""
        rows = _RowList()
        return deepcopy(self, {id(self._sink): rows, id(self._rows): rows})

    def _take_rows(self) -> list[Record]:
        rows, self._rows.rows = self._rows.rows, []
        return rows


def fits(head: bytes) -> bool:
    """Whether the bytes are text: hardly any control characters but those of a console."""
    sample = head[: 1 << 14].replace(b"\0", b"")
    strange = len(sample) - len(sample.translate(None, _CONTROL_BYTES))
    return bool(sample.strip()) and strange <= len(sample) * 0.02


def read(source: LogSource) -> LogTable:
    builder = TableBuilder()
    following = ConsoleParser(builder)
    for text in decode_lines(source.chunks()):
        following.feed(text)
    following.finish()
    builder.settings.update(following.settings)
    return builder.build(FORMAT, source.path, following.tail)
