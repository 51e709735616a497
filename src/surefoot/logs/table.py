"""A log once it is read: named columns of numbers, whatever the format was."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from surefoot.story.run_story import RunStory

MAX_VALUES_PER_COLUMN = 1 << 21
"""Longer columns are thinned, keeping their peaks, so that memory stays bounded."""
MAX_VALUES = 12 << 20
"""Limit over all columns: a log with many columns keeps fewer values of each."""
MAX_COLUMNS = 2000
"""A log that keeps inventing names must not fill the memory."""
MAX_TAIL_CHARS = 1 << 16
"""Characters kept from the end of a console log, where the exception is."""


THINNED_NOTE = "the log is so long that it was thinned: the lowest and the highest of every four values are kept"


@dataclass(frozen=True, slots=True)
class LogColumn:
    """The values under one name, and the index of the record (line, row, event) of each."""

    rows: NDArray[np.int64]
    values: NDArray[np.float64]
    """A NaN was logged as NaN; values that were not logged are absent."""

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogTable:
    """One log, read."""

    format: str
    """trainer_state, json, jsonl, csv, tsv, tensorboard, wandb, nanogpt, text, run, or arrays."""
    path: str
    records: int
    columns: Mapping[str, LogColumn]
    skipped: Mapping[str, int] = field(default_factory=dict)
    """What was skipped: the reason (plural, such as "lines cut off in the middle") and how often."""
    notes: tuple[str, ...] = ()
    """Remarks on how the log was read, for the user."""
    tail: str = ""
    """The last text of a console log, which may contain the exception."""
    settings: Mapping[str, float | str] = field(default_factory=dict)
    """Settings found in the log, by their names there: max_steps, fp16, num_train_epochs, ..."""
    story: RunStory | None = None
    """What the run itself tells, if it is a surefoot run."""


class TableBuilder:
    """Collects records in bounded memory and builds a `LogTable`."""

    def __init__(self) -> None:
        self.records = 0
        self.skipped: Counter[str] = Counter()
        self.notes: list[str] = []
        self.settings: dict[str, float | str] = {}
        self._columns: dict[str, tuple[array[int], array[float]]] = {}
        self._empty: dict[str, tuple[int, int]] = {}
        self._max_values = MAX_VALUES_PER_COLUMN

    def add(self, record: Mapping[str, float]) -> None:
        """Add one record (a line, a row, an event); names without a value are left out."""
        number = self.records
        columns = self._columns
        for name, value in record.items():
            column = columns.get(name)
            if column is None:
                if len(columns) >= MAX_COLUMNS:
                    self.skipped[f"values under names beyond the first {MAX_COLUMNS}"] += 1
                    continue
                column = columns[name] = (array("q"), array("d"))
                self._max_values = _max_values(len(columns))
            column[0].append(number)
            column[1].append(value)
            if len(column[1]) >= self._max_values:
                columns[name] = self._thinned(*column)
        self.records = number + 1

    def extend(self, columns: Mapping[str, NDArray[np.float64]], present: Mapping[str, NDArray[np.bool_]]) -> None:
        """Add many records as arrays of one length; `present` masks the columns that are not filled everywhere."""
        count = max((len(values) for values in columns.values()), default=0)
        numbers = np.arange(self.records, self.records + count, dtype=np.int64)
        for name, values in columns.items():
            mask = present.get(name)
            self.add_values(name, numbers, values) if mask is None else self.add_values(
                name, numbers[mask], values[mask]
            )
        self.records += count

    def add_values(self, name: str, rows: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        """Add values of one column at ascending record indices after all earlier ones; does not count the records."""
        if not len(values):
            return
        column = self._columns.get(name)
        if column is None:
            if len(self._columns) >= MAX_COLUMNS:
                self.skipped[f"values under names beyond the first {MAX_COLUMNS}"] += len(values)
                return
            column = self._columns[name] = (array("q"), array("d"))
            self._max_values = _max_values(len(self._columns))
        column[0].frombytes(rows.astype(np.int64, copy=False).tobytes())
        column[1].frombytes(values.astype(np.float64, copy=False).tobytes())
        while len(column[1]) >= self._max_values:
            column = self._columns[name] = self._thinned(*column)

    def add_empty(self, name: str, rows: NDArray[np.int64]) -> None:
        """Note records in which the name is present without a value (null, an empty cell); call after adding values."""
        column = self._columns.get(name)
        last = column[0][-1] if column else -1
        rows = rows[rows > last]
        if not len(rows) or (name not in self._empty and len(self._empty) >= MAX_COLUMNS):
            return
        first, count = self._empty.get(name, (-1, 0))
        self._empty[name] = (first, count + len(rows)) if first > last else (int(rows[0]), len(rows))

    def trailing_empty(self) -> dict[str, tuple[int, int]]:
        """Columns that end in empty records: the first of those records, and how many."""
        last = {name: column[0][-1] for name, column in self._columns.items() if column[0]}
        return {name: void for name, void in self._empty.items() if void[0] > last.get(name, -1)}

    def skip(self, reason: str, count: int = 1) -> None:
        """Count something skipped; the reason is plural, such as "lines that are not JSON"."""
        self.skipped[reason] += count

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def build(self, format: str, path: str, ending: str = "") -> LogTable:
        columns = {
            name: LogColumn(np.frombuffer(rows, dtype=np.int64), np.frombuffer(values, dtype=np.float64))
            for name, (rows, values) in self._columns.items()
            if len(values)
        }
        return LogTable(
            format=format,
            path=path,
            records=self.records,
            columns=columns,
            skipped=dict(self.skipped),
            notes=tuple(self.notes),
            tail=ending[-MAX_TAIL_CHARS:],
            settings=dict(self.settings),
        )

    def _thinned(self, rows: array[int], values: array[float]) -> tuple[array[int], array[float]]:
        """Keep the lowest and the highest of every four neighbours, and all where values rise; a NaN is the highest."""
        self.note(THINNED_NOTE)
        whole = len(values) // 4 * 4
        numbers = np.frombuffer(rows, dtype=np.int64)
        data = np.frombuffer(values, dtype=np.float64)
        fours = data[:whole].reshape(-1, 4)
        lows = np.where(np.isnan(fours), np.inf, fours)
        low = lows.argmin(1)
        high = fours.argmax(1)
        high = np.where(low == high, (low + 1) % 4, high)
        kept = np.repeat(_rises(lows.min(1))[:, None], 4, axis=1)
        every = np.arange(len(fours))
        kept[every, low] = kept[every, high] = True
        index = np.concatenate([np.flatnonzero(kept), np.arange(whole, len(data))])
        return array("q", numbers[index].tobytes()), array("d", data[index].tobytes())


_RISE_GROUPS = 8
_KEPT_WHOLE = 0.01
"""Share of the groups that are kept whole: those at the largest rises, so that a jump can be dated to the row."""


def _rises(lows: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Where the following values are highest above those before."""
    if len(lows) <= 2 * _RISE_GROUPS:
        return np.ones(len(lows), dtype=np.bool_)
    size = np.where(np.isfinite(lows), lows, 0.0)
    total = np.concatenate([[0.0], np.cumsum(size / max(float(np.abs(size).max()), 1e-300))])
    means = total[_RISE_GROUPS:] - total[:-_RISE_GROUPS]
    rises = np.zeros(len(lows))
    rises[_RISE_GROUPS : len(lows) - _RISE_GROUPS + 1] = means[_RISE_GROUPS:] - means[:-_RISE_GROUPS]
    return rises > max(float(np.quantile(rises, 1 - _KEPT_WHOLE)), 0.0)


def _max_values(columns: int) -> int:
    return max(1 << 12, min(MAX_VALUES_PER_COLUMN, MAX_VALUES // columns))


class UnorderedColumns:
    """Collects values of a block of records in any order and adds them to a builder in record order."""

    def __init__(self, builder: TableBuilder) -> None:
        self._builder = builder
        self._parts: dict[str, list[tuple[NDArray[np.int64], NDArray[np.float64]]]] = defaultdict(list)
        self._empty: dict[str, list[NDArray[np.int64]]] = defaultdict(list)

    def add(self, name: str, rows: NDArray[np.int64], values: NDArray[np.float64]) -> None:
        if len(rows):
            self._parts[name].append((rows, values))

    def add_empty(self, name: str, rows: NDArray[np.int64]) -> None:
        """Note records in which the name is present without a value."""
        if len(rows):
            self._empty[name].append(rows)

    def flush(self) -> None:
        for name, parts in self._parts.items():
            if len(parts) == 1:
                self._builder.add_values(name, *parts[0])
                continue
            rows = np.concatenate([part[0] for part in parts])
            order = np.argsort(rows, kind="stable")
            # Two names that are equal once stripped: the first wins.
            order = order[np.diff(rows[order], prepend=-1) > 0]
            self._builder.add_values(name, rows[order], np.concatenate([part[1] for part in parts])[order])
        for name, rows in self._empty.items():
            self._builder.add_empty(name, np.sort(np.concatenate(rows)))
        self._parts.clear()
        self._empty.clear()
