"""CSV, TSV and similar text tables, including W&B chart exports with several runs side by side."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray

from surefoot.logs.formats.csv_dialect import SPACES, Dialect, detect_dialect, is_comment, split_cells
from surefoot.logs.formats.log_source import LogSource, decode
from surefoot.logs.formats.metric_names import SETTINGS, is_split_field, metric_fields, split_of, with_split
from surefoot.logs.formats.missing_values import resolve_missing
from surefoot.logs.formats.parse_number import parse_number
from surefoot.logs.log_diagnosis import UnreadableInput
from surefoot.logs.table import LogTable, TableBuilder, UnorderedColumns

FORMAT = "csv"
_TAG = re.compile(r"-tag-(.+)", re.I)
_CONTROL = re.compile(rb"[\x01-\x08\x0e-\x1a\x1c-\x1f]")
_COMMENT_LINE = re.compile(r"^\s*(?:#|%|//|[-=+|]{3})", re.M)
Cells = list[str]
Bools = NDArray[np.bool_]
Parsed = tuple[NDArray[np.float64], Bools | None]


def fits(head: bytes) -> bool:
    """Whether the text is a header over rows of numbers, or rows of numbers alone."""
    return not _CONTROL.search(head[:4096]) and detect_dialect(_sample(head)) is not None


def read(source: LogSource) -> LogTable | list[LogTable]:
    """Read a table; an export with several runs side by side gives one table per run."""
    dialect = detect_dialect(_sample(source.head))
    if dialect is None:
        raise UnreadableInput(f"{source.path} is not a table: no header over numbers was found")
    reading = CsvReader(dialect, source.path)
    for block in source.blocks():
        reading.feed(decode(block))
    if not reading.builder.records:
        raise UnreadableInput(f"{source.path} has a header, but no row with numbers")
    format = "tsv" if dialect.delimiter == "\t" else FORMAT
    table = resolve_missing(reading.builder.build(format, source.path), reading.builder.trailing_empty())
    return split_by_run(table)


def _sample(head: bytes) -> str:
    """The complete lines of the head."""
    text = decode(head)
    whole = text.rfind("\n") + 1
    return text[:whole] if whole and len(head) >= 1 << 15 else text


class CsvReader:
    """Reads one table block by block."""

    def __init__(self, dialect: Dialect, path: str) -> None:
        self.builder = TableBuilder()
        self._dialect = dialect
        self._path = path
        self._headers = 1
        self._lines_before_header = dialect.lines_before_header
        """Lines left before the first row, the header the last of them; negative once it is past."""
        self._set_names(dialect.header or tuple(f"col{index + 1}" for index in range(dialect.width)))

    def _set_names(self, header: Sequence[str]) -> None:
        """Set the column names from here on."""
        self._header = tuple(header)
        names = [name or ("index" if index == 0 else f"col{index + 1}") for index, name in enumerate(header)]
        if [name.lower() for name in names] == ["wall time", "step", "value"] and (tag := _TAG.search(self._stem())):
            names[2] = tag[1]
        if self._dialect.mlflow:
            names = ["timestamp", self._stem() or "value", "step"][: len(names)]
        seen: dict[str, int] = defaultdict(int)
        self._names: list[str] = []
        for name in names:
            seen[name] += 1
            self._names.append(name if seen[name] == 1 else f"{name}.{seen[name] - 1}")

    def _stem(self) -> str:
        return PurePath(self._path).stem

    def feed(self, text: str) -> None:
        """Add a block of whole lines; only the last may lack its newline."""
        if (
            self._lines_before_header >= 0
            or not text.endswith("\n")
            or len(self._names) < 2
            or not self._feed_regular(text)
        ):
            self.feed_by_row(text)

    def feed_by_row(self, text: str) -> None:
        """Add a block row by row."""
        whole = text.endswith("\n")
        rows: list[Cells] = []
        lines = _lines(text)
        for index, line in enumerate(lines):
            self._add_row(line, rows, torn=not whole and index == len(lines) - 1)
        self._flush(rows)

    def _feed_regular(self, text: str) -> bool:
        """Add a regular block without looking at single rows; returns whether that was possible."""
        lines = _lines(text)
        matrix = _load_matrix(text, lines, self._dialect)
        if matrix is not None and matrix[0].shape[1] == len(self._names):
            values, filled = matrix
            present = None if filled else ~np.isnan(values)
            if present is None:
                return self._add_columns(None, [(column, None) for column in values.T])
            return self._add_columns(None, [(values[:, at], present[:, at]) for at in range(values.shape[1])])
        cells = self._regular_cells(text, lines)
        return cells is not None and self._add_columns(
            cells, [_parse_column(column, self._dialect.decimal_comma) for column in cells]
        )

    def _regular_cells(self, text: str, lines: list[str]) -> list[Cells] | None:
        """The cells by column if every line has all of them and none is quoted; else None."""
        sign, width = self._dialect.delimiter, len(self._names)
        if '"' in text or sign == "|" or _COMMENT_LINE.search(text):
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

    def _add_row(self, line: str, rows: list[Cells], *, torn: bool) -> None:
        """Add one line, handling irregular rows."""
        if not line.strip() or is_comment(line.lstrip()):
            return
        if self._lines_before_header >= 0:
            if self._lines_before_header:
                self.builder.skip("lines before the table")
            self._lines_before_header -= 1
            return
        cells = split_cells(line, self._dialect.delimiter)
        if not any(parse_number(cell, comma=self._dialect.decimal_comma) is not None for cell in cells):
            self._handle_textual_row(cells, rows)
            return
        short = len(self._names) - len(cells)
        if short > 0 and torn:
            cells.pop()
            self.builder.skip("lines cut off in the middle")
        elif short:
            self.builder.skip("rows shorter than the header" if short > 0 else "rows longer than the header")
        rows.append(cells[: len(self._names)] + [""] * (len(self._names) - len(cells)))

    def _handle_textual_row(self, cells: Cells, rows: list[Cells]) -> None:
        """Handle a row without numbers: the header of an appended run, perhaps with other columns, or noise."""
        known = set(self._header)
        if sum(cell in known for cell in cells) * 2 >= max(len(cells), 2) - 1 and any(cells):
            self._flush(rows)
            if tuple(cells) != self._header:
                self._set_names(cells)
            self._headers += 1
            self.builder.notes = [note for note in self.builder.notes if "header" not in note]
            self.builder.note(f"the file contains the header {self._headers} times: runs were appended to it")
        elif any(cells):
            self.builder.skip("rows without a number")

    def _flush(self, rows: list[Cells]) -> None:
        if rows:
            cells = [list(column) for column in zip(*rows, strict=True)]
            self._add_columns(
                cells, [_parse_column(column, self._dialect.decimal_comma) for column in cells], certain=True
            )
        rows.clear()

    def _add_columns(self, cells: list[Cells] | None, parsed: list[Parsed], *, certain: bool = False) -> bool:
        """Add columns to the table; returns False, without adding, if a row has no number and needs a closer look.

        `cells` are the texts the numbers were parsed from, None if there is nothing but numbers.
        """
        if not certain and all(present is not None for _, present in parsed):
            somewhere = np.logical_or.reduce([present for _, present in parsed if present is not None])
            if not somewhere.all():
                return False
        count = len(parsed[0][0])
        rows = np.arange(self.builder.records, self.builder.records + count, dtype=np.int64)
        parts = UnorderedColumns(self.builder)
        groups = list(self._group_by_split(cells, count))
        named = metric_fields(tuple(self._names))
        skipped = self._add_long_format(named, cells, parsed, rows, parts) if named and cells else None
        for index, (values, present) in enumerate(parsed):
            if index == skipped:
                continue
            for split, in_split in groups:
                mask = present if in_split is None else in_split if present is None else in_split & present
                name = with_split(split, self._names[index])
                parts.add(name, *((rows, values) if mask is None else (rows[mask], values[mask])))
                if mask is not None:
                    parts.add_empty(name, rows[~mask] if in_split is None else rows[in_split & ~mask])
        parts.flush()
        self.builder.records += count
        return True

    def _group_by_split(self, columns: list[Cells] | None, count: int) -> Iterator[tuple[str, Bools | None]]:
        """Rows by the value of a split column such as `phase`."""
        for name, cells in zip(self._names, columns or [], strict=False):
            splits = {cell: split_of(cell) for cell in set(cells)} if is_split_field(name) else {}
            if any(splits.values()):
                by_split: dict[str, list[str]] = defaultdict(list)
                for cell, split in splits.items():
                    by_split[split if split and split != SETTINGS else ""].append(cell)
                for split, texts in by_split.items():
                    chosen = frozenset(texts)
                    yield split, np.fromiter((cell in chosen for cell in cells), np.bool_, count)
                return
        yield "", None

    def _add_long_format(
        self,
        named: tuple[str, str],
        columns: list[Cells],
        parsed: list[Parsed],
        rows: NDArray[np.int64],
        parts: UnorderedColumns,
    ) -> int | None:
        """One value per row, its name in another column; returns the index of the value column."""
        name_column, value = (self._names.index(name) for name in named)
        values, present = parsed[value]
        numbers = parsed[name_column][1]
        if numbers is None or numbers.any():
            return None  # the names are numbers
        for name in sorted(set(columns[name_column])):
            mask = np.fromiter((cell == name for cell in columns[name_column]), np.bool_, len(rows))
            mask = mask if present is None else mask & present
            parts.add(name, rows[mask], values[mask])
        return value


def _lines(text: str) -> list[str]:
    lines = text.removesuffix("\n").split("\n")
    return [line.rstrip("\r") for line in lines] if "\r" in text else lines


def _load_matrix(text: str, lines: list[str], dialect: Dialect) -> tuple[NDArray[np.float64], bool] | None:
    """Parse a purely numeric block with NumPy, and whether it is filled; if it is not, NaN marks an empty cell.

    That is unambiguous only if the block contains no NaN. None if it contains anything else.
    """
    sign = None if dialect.delimiter == SPACES else dialect.delimiter
    if sign == "|":
        return None
    if dialect.decimal_comma:
        text = text.replace(",", ".")
        lines = text.removesuffix("\n").split("\n")
    filled = sign is None or not any(blank in text for blank in (sign * 2, f"{sign}\n", f"\n{sign}", f"{sign}\r"))
    if sign is not None and (not filled or text.startswith(sign)):
        if "nan" in text.lower():
            return None
        filled, lines = False, [_fill_blanks(line, sign) for line in lines]
    try:
        quote = '"' if '"' in text else None
        return np.loadtxt(lines, delimiter=sign, comments=None, quotechar=quote, ndmin=2), filled
    except ValueError:
        return None


def _fill_blanks(line: str, sign: str) -> str:
    line = line.replace(sign * 2, f"{sign}nan{sign}").replace(sign * 2, f"{sign}nan{sign}")
    line = f"nan{line}" if line.startswith(sign) else line
    return f"{line}nan" if line.endswith(sign) else line


def _parse_column(cells: Cells, comma: bool) -> Parsed:
    """The numbers of a column, and a mask of where they are; None for everywhere."""
    plain = [cell.replace(",", ".") for cell in cells] if comma else cells
    try:
        return np.fromiter(map(float, plain), np.float64, len(cells)), None
    except ValueError:
        pass
    known = {cell: parse_number(cell, comma=comma) for cell in set(cells)}
    values = [known[cell] for cell in cells]
    present = np.fromiter((value is not None for value in values), np.bool_, len(cells))
    return np.array(values, dtype=np.float64), None if present.all() else present


_BAND_SUFFIXES = ("__MIN", "__MAX")
_RUN_SEPARATOR = " - "


def split_by_run(table: LogTable) -> LogTable | list[LogTable]:
    """Split W&B columns such as `proud-sun-7 - train/loss` by run; their `__MIN` and `__MAX` twins are dropped."""
    names = table.columns
    kept = [name for name in names if not (name.endswith(_BAND_SUFFIXES) and name[:-5] in names)]
    runs: dict[str, list[str]] = defaultdict(list)
    shared: list[str] = []
    for name in kept:
        run, apart, metric = name.rpartition(_RUN_SEPARATOR)
        runs[run].append(name) if apart and run.strip() and metric.strip() else shared.append(name)
    if not runs or (len(kept) == len(names) and len(shared) > 2):
        return table if len(kept) == len(names) else replace(table, columns={name: names[name] for name in kept})
    tables = [_run_table(table, run, columns, shared) for run, columns in runs.items()]
    return tables[0] if len(tables) == 1 else tables


def _run_table(table: LogTable, run: str, run_columns: list[str], shared: list[str]) -> LogTable:
    columns = {name: table.columns[name] for name in shared}
    columns |= {name.rpartition(_RUN_SEPARATOR)[2].strip(): table.columns[name] for name in run_columns}
    return replace(table, columns=columns, settings={**table.settings, "run": run.strip().strip('"')})
