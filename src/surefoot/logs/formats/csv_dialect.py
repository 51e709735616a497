"""Detects how a text table is written: delimiter, header, decimal sign."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from surefoot.logs.formats.parse_number import is_missing, parse_number

SPACES = " "
"""Delimiter of tables whose cells are separated by any number of blanks."""
_MAX_LINES = 200
_RULER = re.compile(r"[\s|+:=*-]{3,}")
_COMMENT = ("#", "%", "//")
_DECIMAL_COMMA = re.compile(r"\s*[+-]?\d+,\d+(?:[eE][+-]?\d+)?\s*")
_DECIMAL_POINT = re.compile(r"\s*[+-]?\d*\.\d+(?:[eE][+-]?\d+)?\s*")


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a table is written."""

    delimiter: str
    header: tuple[str, ...] | None
    """Column names; None if the table starts with numbers."""
    width: int
    decimal_comma: bool = False
    """Decimals are written with a comma."""
    mlflow: bool = False
    """A metric file of MLflow: rows of time, value and step; the metric is named by the file."""
    lines_before_header: int = -1
    """Lines before the header, comments not counted; -1 without a header, or with one in a comment."""


def is_comment(line: str) -> bool:
    """Whether a line is a comment or a ruler of dashes."""
    return line.startswith(_COMMENT) or _RULER.fullmatch(line) is not None


def split_cells(line: str, delimiter: str) -> list[str]:
    """The cells of one line, stripped."""
    if delimiter == SPACES:
        return line.split()
    if delimiter == "|":
        line = line.strip()
        line = line.removeprefix("|").removesuffix("|") if line.startswith("|") else line
    if '"' in line:
        try:
            return [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter, skipinitialspace=True))]
        except (csv.Error, StopIteration):
            pass
    return [cell.strip() for cell in line.split(delimiter)]


def detect_dialect(head: str) -> Dialect | None:
    """The dialect of a table, from its first lines; None if it is not a table."""
    lines = [line.strip("\r") for line in head.split("\n")]
    lines = [line for line in lines[: _MAX_LINES * 2] if line.strip()][:_MAX_LINES]
    rows = [line for line in lines if not is_comment(line.lstrip())]
    if len(rows) < 2:
        return None
    for delimiter in _candidate_delimiters(lines, rows):
        if dialect := _try_delimiter(lines, rows, delimiter):
            return dialect
    return None


def _candidate_delimiters(lines: Sequence[str], rows: Sequence[str]) -> list[str]:
    """Delimiters in the order to try; the semicolon precedes the comma, which may be a decimal sign."""
    ruled = any(_RULER.fullmatch(line) and "|" in line for line in lines[:5]) or not rows[0].lstrip().startswith("|")
    tried = [";", "\t", ",", *(["|"] if ruled else [])]
    body = rows[len(rows) // 2]
    return [sign for sign in tried if sign in body or sign in rows[0]] + [SPACES, ","]


def _try_delimiter(lines: Sequence[str], rows: Sequence[str], delimiter: str) -> Dialect | None:
    parted = [split_cells(row, delimiter) for row in rows]
    first = set(parted[0])
    # A repeated header, from an appended run, counts neither way.
    rest = [cells for cells in parted[1:] if len(first.intersection(cells)) * 2 <= len(cells)] or parted[1:]
    width = Counter(map(len, rest)).most_common(1)[0][0]
    if (width == 1) != (delimiter == "," and all("," not in row for row in rows)):
        return None
    body = [cells for cells in rest if len(cells) == width]
    if len(body) < 0.6 * len(rest):
        return None
    comma = delimiter != "," and _decimal_comma(body)
    shares = [_numeric_share([cells[index] for cells in body], comma) for index in range(width)]
    at = _header_row(parted, width, shares, comma)
    if at is None or not _enough_numbers(shares, delimiter, headed=at >= 0):
        return None
    if at < 0:
        named = _names_from_comment(lines, delimiter, width)
        return Dialect(delimiter, named, width, comma, named is None and _is_mlflow_metric(parted, delimiter))
    header = parted[at]
    if delimiter == SPACES and len(header) != width:
        return None
    return Dialect(delimiter, tuple(header), max(width, len(header)), comma, lines_before_header=at)


def _enough_numbers(shares: list[float], delimiter: str, *, headed: bool) -> bool:
    """Blanks separate the words of any text, so nearly all cells must be numbers; likewise without a header."""
    numeric = sum(share >= 0.8 for share in shares)
    if delimiter == SPACES or not headed:
        return numeric >= 0.8 * len(shares)
    return numeric >= 1 and numeric >= 0.25 * sum(share >= 0 for share in shares)


def _numeric_share(cells: list[str], comma: bool) -> float:
    """The share of numbers among the non-empty cells of a column; -1 for an empty column."""
    filled = [cell for cell in cells if not is_missing(cell)]
    return sum(parse_number(cell, comma=comma) is not None for cell in filled) / len(filled) if filled else -1.0


def _decimal_comma(body: list[list[str]]) -> bool:
    cells = [cell for row in body[:50] for cell in row]
    commas = sum(_DECIMAL_COMMA.fullmatch(cell) is not None for cell in cells)
    return commas > 0 and commas > sum(_DECIMAL_POINT.fullmatch(cell) is not None for cell in cells)


def _header_row(parted: list[list[str]], width: int, shares: list[float], comma: bool) -> int | None:
    """The index of the header row: -1 for none; None if the first row is neither header nor numbers."""
    for at, cells in enumerate(parted[:6]):
        if len(cells) < min(width, 2) and width > 1:
            continue  # a title before the table
        texts = [parse_number(cell, comma=comma) is None and not is_missing(cell) for cell in cells]
        pairs = zip(texts, shares, strict=False)
        if any(text and share >= 0.8 for text, share in pairs) and sum(texts) * 2 >= len(cells):
            return at if _are_names(cells) else None
        if at == 0 and cells[0] == "" and len(cells) == width and all(row[0] != "" for row in parted[1:]):
            return at  # the unnamed index of pandas before columns named by numbers
        return -1
    return None


def _is_mlflow_metric(parted: list[list[str]], delimiter: str) -> bool:
    if delimiter != SPACES or len(parted[0]) not in (2, 3):
        return False
    times = [row[0] for row in parted]
    if not all(re.fullmatch(r"1\d{9}|1\d{12}", time) for time in times):
        return False
    return len(parted[0]) == 2 or all(row[-1].isdigit() for row in parted if len(row) == 3)


def _are_names(cells: list[str]) -> bool:
    filled = [cell for cell in cells if cell]
    return all(len(cell) < 300 for cell in filled) and len(set(filled)) > 0.5 * len(filled)


def _names_from_comment(lines: Sequence[str], delimiter: str, width: int) -> tuple[str, ...] | None:
    """numpy.savetxt puts the header into a comment."""
    for line in lines:
        if not line.startswith(_COMMENT):
            return None
        cells = split_cells(line.lstrip("#%/ \t"), delimiter)
        if len(cells) == width and all(cells) and all(parse_number(cell) is None for cell in cells):
            return tuple(cells)
    return None
