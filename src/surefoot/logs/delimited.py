"""Tables in text: CSV, TSV and their kin, with the dirt that real ones have."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray

from surefoot.logs.dialect import SPACES, Dialect, cells_of, comment, told
from surefoot.logs.exports import parted_by_run
from surefoot.logs.gaps import cleared
from surefoot.logs.labels import SETTINGS, is_split, metric_fields, prefixed, split_of
from surefoot.logs.numbers import number
from surefoot.logs.source import LONGEST, Source, decoded
from surefoot.logs.table import Gatherer, Parts, Table, Unreadable

FORMAT = "csv"
_BLOCK = 1 << 20
_TAG = re.compile(r"-tag-(.+?)(?:\.csv)?", re.I)
_CONTROL = re.compile(rb"[\x01-\x08\x0e-\x1a\x1c-\x1f]")
_REMARK = re.compile(r"^\s*(?:#|%|//|[-=+|]{3})", re.M)
Cells = list[str]
Bools = NDArray[np.bool_]
Parsed = tuple[NDArray[np.float64], Bools | None]


def fits(head: bytes) -> bool:
    """A header over rows of numbers, or rows of numbers alone."""
    return not _CONTROL.search(head[:4096]) and told(_sample(head)) is not None


def read(source: Source) -> Table | list[Table]:
    """The columns of a table; an export with several runs side by side gives a table for each."""
    dialect = told(_sample(source.head))
    if dialect is None:
        raise Unreadable(f"{source.path} is no table: no header over numbers was found")
    reading = _Reading(dialect, source.path)
    for text, last in _texts(source):
        reading.take(text, last=last)
    if not reading.gatherer.records:
        raise Unreadable(f"{source.path} has a header, but no row with numbers")
    format = "tsv" if dialect.delimiter == "\t" else FORMAT
    table = cleared(reading.gatherer.table(format, source.path), reading.gatherer.voids())
    return parted_by_run(table)


def _sample(head: bytes) -> str:
    """The whole lines at the start."""
    text = decoded(head)
    whole = text.rfind("\n") + 1
    return text[:whole] if whole and len(head) >= 1 << 15 else text


def _texts(source: Source) -> Iterator[tuple[str, bool]]:
    """Blocks of whole lines, and whether a block is the last; a line without end is cut."""
    rest = b""
    for chunk in source.chunks(_BLOCK):
        rest += chunk
        end = rest.rfind(b"\n") + 1
        if len(rest) < _BLOCK or (not end and len(rest) < LONGEST):
            continue
        end = end or len(rest)
        yield decoded(rest[:end]), False
        rest = rest[end:]
    yield decoded(rest), True


class _Reading:
    """One table under way."""

    def __init__(self, dialect: Dialect, path: str) -> None:
        self.gatherer = Gatherer()
        self._dialect = dialect
        self._path = path
        self._headers = 1
        self._before = dialect.before
        """Lines to come before the first row, the header the last of them; less than 0 once it is past."""
        self._named(dialect.header or tuple(f"col{index + 1}" for index in range(dialect.width)))

    def _named(self, header: Sequence[str]) -> None:
        """The names that count from here on."""
        self._header = tuple(header)
        names = [name or ("index" if index == 0 else f"col{index + 1}") for index, name in enumerate(header)]
        if [name.lower() for name in names] == ["wall time", "step", "value"] and (tag := _TAG.search(self._stem())):
            names[2] = tag[1]
        seen: dict[str, int] = defaultdict(int)
        self._names: list[str] = []
        for name in names:
            seen[name] += 1
            self._names.append(name if seen[name] == 1 else f"{name}.{seen[name] - 1}")

    def _stem(self) -> str:
        return PurePath(self._path).stem

    def take(self, text: str, *, last: bool) -> None:
        """A block of whole lines."""
        lines = text.split("\n")
        torn = bool(lines[-1]) and last
        if not lines[-1]:
            lines.pop()
        if "\r" in text:
            lines = [line.rstrip("\r") for line in lines]
        cells = None if self._before >= 0 or torn else self._regular(text, lines)
        if cells is not None and self._put(cells):
            return
        rows: list[Cells] = []
        for index, line in enumerate(lines):
            self._row(line, rows, torn=torn and index == len(lines) - 1)
        self._flush(rows)

    def _regular(self, text: str, lines: list[str]) -> list[Cells] | None:
        """The cells by column where every line has all of them and none is quoted, which is quick; else None."""
        sign, width = self._dialect.delimiter, len(self._names)
        if '"' in text or "'" in text or not lines or sign == "|" or width < 2 or _REMARK.search(text):
            return None
        if sign == SPACES:
            parted = [line.split() for line in lines]
            if any(len(cells) != width for cells in parted):
                return None
            return [list(column) for column in zip(*parted, strict=True)]
        if {line.count(sign) for line in lines} != {width - 1}:
            return None
        cells = sign.join(lines).split(sign)
        return [cells[index::width] for index in range(width)]

    def _row(self, line: str, rows: list[Cells], *, torn: bool) -> None:
        """One line the careful way."""
        if not line.strip() or comment(line.lstrip()):
            return
        if self._before >= 0:
            if self._before:
                self.gatherer.skip("lines before the table")
            self._before -= 1
            return
        cells = cells_of(line, self._dialect.delimiter)
        if not any(number(cell, comma=self._dialect.comma) is not None for cell in cells):
            self._without_numbers(cells, rows)
            return
        short = len(self._names) - len(cells)
        if short > 0 and torn:
            cells.pop()
            self.gatherer.skip("lines cut off in the middle")
        elif short:
            self.gatherer.skip("rows shorter than the header" if short > 0 else "rows longer than the header")
        rows.append(cells[: len(self._names)] + [""] * (len(self._names) - len(cells)))

    def _without_numbers(self, cells: Cells, rows: list[Cells]) -> None:
        """The header again, because a run was appended, perhaps with other columns; or dirt."""
        known = set(self._header)
        if sum(cell in known for cell in cells) * 2 >= max(len(cells), 2) - 1 and any(cells):
            self._flush(rows)
            if tuple(cells) != self._header:
                self._named(cells)
            self._headers += 1
            self.gatherer.notes = [note for note in self.gatherer.notes if "header" not in note]
            self.gatherer.note(f"the header stands in the file {self._headers} times: runs were appended to it")
        elif any(cells):
            self.gatherer.skip("rows without a number")

    def _flush(self, rows: list[Cells]) -> None:
        if rows:
            self._put([list(column) for column in zip(*rows, strict=True)], certain=True)
        rows.clear()

    def _put(self, columns: list[Cells], *, certain: bool = False) -> bool:
        """Columns of cells into columns of numbers; False where a row has none and so needs a second look."""
        parsed = [_numbers(cells, self._dialect.comma) for cells in columns]
        if not certain and all(present is not None for _, present in parsed):
            somewhere = np.logical_or.reduce([present for _, present in parsed if present is not None])
            if not somewhere.all():
                return False
        count = len(columns[0])
        rows = np.arange(self.gatherer.records, self.gatherer.records + count, dtype=np.int64)
        parts = Parts(self.gatherer)
        groups = list(self._told_apart(columns, count))
        named = metric_fields(tuple(self._names))
        skipped = self._long(named, columns, parsed, rows, parts) if named else None
        for index, (values, present) in enumerate(parsed):
            if index == skipped:
                continue
            for split, mine in groups:
                here = present if mine is None else mine if present is None else mine & present
                name = prefixed(split, self._names[index])
                parts.add(name, *((rows, values) if here is None else (rows[here], values[here])))
                if here is not None:
                    parts.nothing(name, rows[~here] if mine is None else rows[mine & ~here])
        parts.flush()
        self.gatherer.records += count
        return True

    def _told_apart(self, columns: list[Cells], count: int) -> Iterator[tuple[str, Bools | None]]:
        """Rows by what a column such as `phase` says of them."""
        for name, cells in zip(self._names, columns, strict=True):
            splits = {cell: split_of(cell) for cell in set(cells)} if is_split(name) else {}
            if any(splits.values()):
                by_split: dict[str, list[str]] = defaultdict(list)
                for cell, split in splits.items():
                    by_split[split if split and split != SETTINGS else ""].append(cell)
                for split, texts in by_split.items():
                    chosen = frozenset(texts)
                    yield split, np.fromiter((cell in chosen for cell in cells), np.bool_, count)
                return
        yield "", None

    def _long(
        self, named: tuple[str, str], columns: list[Cells], parsed: list[Parsed], rows: NDArray[np.int64], parts: Parts
    ) -> int | None:
        """One value a row, its name in another column; which column was so taken care of."""
        told, value = (self._names.index(name) for name in named)
        values, present = parsed[value]
        numbers = parsed[told][1]
        if numbers is None or numbers.any():
            return None  # numbers for names
        for name in sorted(set(columns[told])):
            here = np.fromiter((cell == name for cell in columns[told]), np.bool_, len(rows))
            here = here if present is None else here & present
            parts.add(name, rows[here], values[here])
        return value


def _numbers(cells: Cells, comma: bool) -> Parsed:
    """The numbers of a column, and where there are any; None for everywhere."""
    plain = [cell.replace(",", ".") for cell in cells] if comma else cells
    try:
        return np.fromiter(map(float, plain), np.float64, len(cells)), None
    except ValueError:
        pass
    values = [number(cell, comma=comma) if cell else None for cell in cells]
    present = np.fromiter((value is not None for value in values), np.bool_, len(cells))
    return np.array(values, dtype=np.float64), None if present.all() else present
