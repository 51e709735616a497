"""The page of numbers: sections of rows, each with its value and the formula or measurement it came from."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

WIDTH = 80
_LABEL, _VALUE = 21, 15
_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"))
_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


@dataclass(frozen=True, slots=True)
class Row:
    """One number of the page."""

    key: str
    label: str
    value: Any
    """For --json."""
    text: str
    """The value as printed."""
    how: str
    """The formula, or what was measured."""


@dataclass(slots=True)
class PageSection:
    """Rows on one topic, then remarks."""

    key: str
    title: str
    rows: list[Row] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """Printed as they are, at the end: recipe lines to paste."""

    def add(self, key: str, label: str, value: Any, text: str, how: str) -> None:
        self.rows.append(Row(key, label, value, text, how))

    def as_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {row.key: {"value": row.value, "text": row.text, "how": row.how} for row in self.rows}
        if self.remarks:
            data["remarks"] = self.remarks
        if self.lines:
            data["lines"] = self.lines
        return data


def page_text(sections: Sequence[PageSection]) -> str:
    """All sections as plain text, at most 80 columns wide."""
    return "\n\n".join("\n".join(_lines(section)) for section in sections)


def _lines(section: PageSection) -> Iterator[str]:
    yield section.title
    yield "-" * len(section.title)
    for row in section.rows:
        yield from _row_lines(row)
    for remark in section.remarks:
        yield from textwrap.wrap(remark, WIDTH, subsequent_indent="  ", break_long_words=False)
    yield from section.lines


def _row_lines(row: Row) -> Iterator[str]:
    """Label, value and explanation in three columns; a value that is too long has a line of its own."""
    head = f"{row.label:<{_LABEL}}{row.text:>{_VALUE}}  "
    if len(head) > _LABEL + _VALUE + 2:
        yield from textwrap.wrap(f"{row.label:<{_LABEL}} {row.text}", WIDTH, subsequent_indent=" " * (_LABEL + 1))
        head = " " * (_LABEL + _VALUE + 2)
        if not row.how:
            return
    wrapped = textwrap.wrap(row.how, WIDTH - len(head), break_long_words=False) or [""]
    for number, text in enumerate(wrapped):
        yield f"{head if number == 0 else ' ' * len(head)}{text}".rstrip()


def format_count(value: float) -> str:
    """7.05 B, 131 M or 12,345."""
    return _scaled(value, _COUNTS) or f"{value:,.0f}"


def format_bytes(value: float) -> str:
    """Decimal units: 28.2 GB."""
    sign = "-" if value < 0 else ""
    return sign + (_scaled(abs(value), _BYTES) or f"{abs(value):.0f} B")


def format_hours(seconds: float) -> str:
    """12 s, 35 min, 7.5 h or 41 days."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size or (unit == "h" and seconds >= size):
            return f"{seconds / size:,.3g} {unit}" if seconds < 1000 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds:.3g} s"


def _scaled(value: float, units: tuple[tuple[float, str], ...]) -> str:
    for size, unit in units:
        if value >= size:
            number = value / size
            return f"{number:.{2 if number < 10 else 1 if number < 100 else 0}f} {unit}"
    return ""
