"""Rows that span several lines: text tables, blocks of one name and number per line, progress bars."""

from __future__ import annotations

import re
from collections import deque

from surefoot.logs.formats.metric_names import MetricRole, parse_metric_name
from surefoot.logs.formats.parse_number import parse_number

Record = dict[str, float]
_CELLS = re.compile(r"\s*[|│┃]\s*|\t+|\s{2,}")
_CELL = re.compile(r"[A-Za-z_%#一-鿿][\w/@.()%\- :#]{0,39}")
_STARTS_WITH_NUMBER = re.compile(r"[\s|│┃]*\d")
_FRACTION = re.compile(r"(\d+)/(\d+)\s*\[?")
_COUNTERS = (MetricRole.STEP, MetricRole.EPOCH)
MAX_BLOCK_LINES = 64
MAX_BAR_STATES = 100_000
"""States of unfinished bars kept in case there is nothing else."""


class TextTableHeader:
    """The header of a text table."""

    def __init__(self, names: list[str], comma: bool) -> None:
        self.names = names
        self._comma = comma

    @classmethod
    def parse(cls, line: str) -> TextTableHeader | None:
        """Parse a header: three names or more, one of them a counter or a loss."""
        line = line.strip().strip("|│┃").strip()
        comma = line.count(",") >= 2
        cells = [cell.strip() for cell in (line.split(",") if comma else _CELLS.split(line))]
        if len(cells) < 3:
            cells = line.split()
        if not 3 <= len(cells) <= 64 or not all(_CELL.fullmatch(cell) for cell in cells):
            return None
        if cells[:2] == ["E", "#"]:
            cells[:2] = ["epoch", "step"]  # spaCy's headers
        roles = [parse_metric_name(cell).role for cell in cells]
        if roles[0] in _COUNTERS or (MetricRole.LOSS in roles and any(role in _COUNTERS for role in roles)):
            return cls(cells, comma)
        return None

    def row(self, line: str) -> Record | None:
        """The numbers of a line below the header, if it is a row."""
        if not _STARTS_WITH_NUMBER.match(line):
            return None
        line = line.strip().strip("|│┃").strip()
        cells = line.split(",") if self._comma else _CELLS.split(line)
        if len(cells) != len(self.names):
            cells = line.split()
            if "%" in line:  # a progress bar after the numbers
                cells = cells[: len(self.names)]
        if len(cells) != len(self.names):
            return None
        record: Record = {}
        for name, cell in zip(self.names, cells, strict=True):
            value = parse_number(cell.strip().rstrip(":").split("/")[0])
            if value is not None:
                record[name] = value
        return record if 2 * len(record) >= len(cells) and len(record) > 1 else None


class NameValueBlock:
    """Collects lines of one name and one number each into a record."""

    def __init__(self) -> None:
        self._record: Record = {}
        self._first_of_kind: dict[tuple[str, ...], tuple[int, Record] | None] = {}
        self.is_eval = False
        """A heading announced eval metrics."""

    def add(self, name: str, value: float, now: int) -> list[Record]:
        done = self.close(now) if name in self._record or len(self._record) >= MAX_BLOCK_LINES else []
        self._record[name] = value
        return done

    def begin(self, place: Record) -> None:
        """Start a block at the position given on a line of its own."""
        self._record = dict(place)

    def close(self, now: int) -> list[Record]:
        """The record of the collected lines, if it is a row; the first of its kind is held until the second comes.

        `now` is the number of rows so far: a first record that would follow later rows is dropped.
        """
        if not self._record:
            return []
        record, self._record = self._record, {}
        roles = {parse_metric_name(name).role for name in record}
        if not roles & {MetricRole.LOSS, MetricRole.REWARD, MetricRole.PERPLEXITY}:
            return []
        if self.is_eval:
            self.is_eval = False
            return [as_eval(record)]
        key = tuple(sorted(record))
        if key in self._first_of_kind:
            first, self._first_of_kind[key] = self._first_of_kind[key], None
            return [record] if first is None or first[0] != now else [first[1], record]
        if len(self._first_of_kind) < MAX_BLOCK_LINES:
            self._first_of_kind[key] = (now, record)
        return []

    def pending_rows(self) -> list[Record]:
        """Held records with a counter, for logs that contain nothing else."""
        return [
            first[1] for first in self._first_of_kind.values() if first and any(_is_counter(name) for name in first[1])
        ]


def as_eval(record: Record) -> Record:
    """Mark the names of a record as eval metrics."""
    return {
        name if parse_metric_name(name).is_eval or _is_counter(name) else f"eval {name}": record[name]
        for name in record
    }


def _is_counter(name: str) -> bool:
    return parse_metric_name(name).role in _COUNTERS


class EpochBars:
    """Progress bars of one epoch each: the last state is the epoch's row; others count only if there are few epochs."""

    def __init__(self) -> None:
        self._done: list[Record] = []
        self._states: deque[Record] = deque(maxlen=MAX_BAR_STATES)
        self._current: Record | None = None
        self._current_count = 0.0
        self._current_position: Record = {}
        self._is_full = False
        self._many_epochs = False

    def add(self, record: Record, place: Record, count: float, total: float, epoch: float) -> list[Record]:
        """Add one state of a bar; returns rows that are final."""
        ready: list[Record] = []
        if self._current is not None and (count < self._current_count or place != self._current_position):
            ready = self._finish(self._current)
        # A full bar is printed again with the eval metrics: the last one counts.
        self._current_count, self._current_position, self._is_full = count, place, count >= total
        self._current = {**place, **record}
        if not self._many_epochs:
            if self._states and self._states[-1].get("step") == epoch * total + count:
                self._states.pop()
            self._states.append({**self._current, "step": epoch * total + count})
        return ready

    def _finish(self, row: Record) -> list[Record]:
        self._current = None
        if self._many_epochs:
            return [row]
        self._done.append(row)
        if len(self._done) < 3:
            return []
        self._many_epochs = True
        self._states.clear()
        return self._done

    def pending_rows(self) -> list[Record]:
        rows = [] if self._current is None else [self._current]
        if self._many_epochs:
            return rows
        done = [*self._done, *(rows if self._is_full else [])]
        return done if len(done) >= 3 else list(self._states)
