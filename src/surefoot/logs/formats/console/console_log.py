"""Console text of any trainer: rows are told from chatter by their names and by how lines are made."""

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
"""Characters without an end of line after which one is made up."""
_PART_CHARS = 1 << 16
_CONTROL_BYTES = bytes([*range(1, 7), *range(14, 27), *range(28, 32), 127])


class _RowList:
    """Rows as a list."""

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
    """Reads text as it comes: `feed` gives the rows of the lines that are complete."""

    def __init__(self, sink: RowSink | None = None) -> None:
        self._rows = _RowList()
        self._sink: RowSink = sink if sink is not None else self._rows
        self._lines = LineReader(self._sink)
        self._rest = ""

    @property
    def tail(self) -> str:
        """The text since the last row, where the exception stands that the run may have ended in."""
        return self._lines.text_since_row.text() + ("\n" + strip_terminal_codes(self._rest) if self._rest else "")

    @property
    def settings(self) -> dict[str, float | str]:
        """Settings that stood in the text."""
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
        """The last line, though no end of line followed it, and what was held back until more of its kind came."""
        rest, self._rest = self._rest, ""
        for line in strip_terminal_codes(rest).split("\n"):
            self._lines.line(line)
        self._lines.finish()
        return self._take_rows()

    def fork(self) -> ConsoleParser:
        """Another that goes on from here by itself and hands its rows back, to see what would come."""
        rows = _RowList()
        return deepcopy(self, {id(self._sink): rows, id(self._rows): rows})

    def _take_rows(self) -> list[Record]:
        rows, self._rows.rows = self._rows.rows, []
        return rows


def fits(head: bytes) -> bool:
    """Anything that is text: nearly no control characters but those of a console."""
    sample = head[: 1 << 14].replace(b"\0", b"")
    strange = len(sample) - len(sample.translate(None, _CONTROL_BYTES))
    return bool(sample.strip()) and strange <= len(sample) * 0.02


def read(source: LogSource) -> LogTable:
    gatherer = TableBuilder()
    following = ConsoleParser(gatherer)
    for text in decode_lines(source.chunks()):
        following.feed(text)
    following.finish()
    gatherer.settings.update(following.settings)
    return gatherer.build(FORMAT, source.path, following.tail)
