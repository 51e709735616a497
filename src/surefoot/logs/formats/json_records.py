"""Turns blocks of records (JSON objects) into columns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surefoot.logs.formats.metric_names import SETTINGS, is_split_field, metric_fields, split_of, with_split
from surefoot.logs.formats.parse_number import parse_number
from surefoot.logs.table import TableBuilder, UnorderedColumns

MAX_DEPTH = 6
"""Nesting depth up to which objects are read."""
_MAX_SETTINGS = 300
_NUMBERS = ({int}, {float}, {int, float})

Rows = NDArray[np.int64]
Record = Mapping[str, Any]


class RecordBlock:
    """Adds records to a table, column by column; the records of one call keep their order."""

    def __init__(self, builder: TableBuilder) -> None:
        self._builder = builder
        self._columns_by_name = UnorderedColumns(builder)

    def add(self, records: Sequence[Record], prefix: str = "") -> None:
        """Append records."""
        first = self._builder.records
        self._add_records(records, np.arange(first, first + len(records), dtype=np.int64), prefix, "", 0)
        self._builder.records += len(records)
        self._columns_by_name.flush()

    def _add_records(self, records: Sequence[Record], rows: Rows, split: str, path: str, depth: int) -> None:
        """Process records with the same keys together: most logs have one or two such shapes."""
        shapes: dict[tuple[str, ...], list[int]] = {shape: [] for shape in dict.fromkeys(map(tuple, records))}
        if len(shapes) > 1:
            for index, shape in enumerate(map(tuple, records)):
                shapes[shape].append(index)
        for shape, at in shapes.items():
            same = [records[index] for index in at] if at else records
            where = rows[at] if at else rows
            if "train_runtime" in shape and depth == 0:
                for record in same:
                    keep_settings(self._builder, record)
                continue
            for group_split, group, group_rows in self._group_by_split(shape, same, where, split, path):
                self._add_columns(shape, group, group_rows, group_split, path, depth)

    def _group_by_split(
        self, shape: tuple[str, ...], records: Sequence[Record], rows: Rows, split: str, path: str
    ) -> list[tuple[str, Sequence[Record], Rows]]:
        """Group records by their split label; records of settings go to the table's settings."""
        groups: dict[str, list[int]] = {}
        for label in filter(is_split_field, shape):
            groups = defaultdict(list)
            for index, record in enumerate(records):
                text = record[label]
                groups[text if isinstance(text, str) else ""].append(index)
            if any(split_of(text) is not None for text in groups):
                break
        else:
            return [(split, records, rows)]
        result: list[tuple[str, Sequence[Record], Rows]] = []
        for text, at in groups.items():
            label_split = split_of(text)
            group = [records[index] for index in at]
            if label_split == SETTINGS and not path:
                for record in group:
                    keep_settings(self._builder, record)
            else:
                result.append((label_split if label_split and label_split != SETTINGS else split, group, rows[at]))
        return result

    def _add_columns(
        self, shape: tuple[str, ...], records: Sequence[Record], rows: Rows, split: str, path: str, depth: int
    ) -> None:
        named = metric_fields(shape)
        if named:
            self._add_long_format(named, records, rows, split, path)
        for name in shape:
            values = [record[name] for record in records]
            if named and name == named[1]:
                values = [None if isinstance(record[named[0]], str) else record[name] for record in records]
            whole = f"{path}/{name.strip()}" if path else name.strip()
            if set(map(type, values)) in _NUMBERS and self._add_dense(with_split(split, whole), rows, values):
                continue
            self._add_mixed(whole, values, rows, split, depth)

    def _add_dense(self, name: str, rows: Rows, values: list[Any]) -> bool:
        try:
            self._columns_by_name.add(name, rows, np.array(values, dtype=np.float64))
        except OverflowError:
            return False
        return True

    def _add_mixed(self, name: str, values: list[Any], rows: Rows, split: str, depth: int) -> None:
        kinds = set(map(type, values))
        if kinds == {dict}:
            if depth < MAX_DEPTH:
                self._add_records(values, rows, split, name, depth + 1)
            return
        # Labels repeat, so each distinct text is parsed once.
        known = {text: parse_number(text) for text in set(values)} if kinds == {str} else {}
        numbers: list[float] = []
        at: list[int] = []
        inner: list[int] = []
        nothing: list[int] = []
        for index, value in (
            enumerate(values) if not known or any(parsed is not None for parsed in known.values()) else ()
        ):
            if value is None:
                nothing.append(index)
            elif isinstance(value, dict):
                inner.append(index)
            elif (converted := known[value] if known else json_number(value)) is not None:
                at.append(index)
                numbers.append(converted)
        if at:
            self._columns_by_name.add(with_split(split, name), rows[at], np.array(numbers, dtype=np.float64))
        if nothing:
            self._columns_by_name.add_empty(with_split(split, name), rows[nothing])
        if inner and depth < MAX_DEPTH:
            self._add_records([values[index] for index in inner], rows[inner], split, name, depth + 1)

    def _add_long_format(
        self, named: tuple[str, str], records: Sequence[Record], rows: Rows, split: str, path: str
    ) -> None:
        """Records with one value each and its name beside it."""
        by_name: dict[str, tuple[list[int], list[float]]] = defaultdict(lambda: ([], []))
        for index, record in enumerate(records):
            metric, value = record[named[0]], json_number(record[named[1]])
            if isinstance(metric, str) and value is not None:
                by_name[metric.strip()][0].append(index)
                by_name[metric.strip()][1].append(value)
        for metric, (at, values) in by_name.items():
            name = with_split(split, f"{path}/{metric}" if path else metric)
            self._columns_by_name.add(name, rows[at], np.array(values, dtype=np.float64))


def json_number(value: Any) -> float | None:
    """A JSON value as a number, also from text or a one-element list; not True and False."""
    if isinstance(value, float):
        return value
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int):
        try:
            return float(value)
        except OverflowError:
            return float("inf") if value > 0 else float("-inf")
    if isinstance(value, list) and len(value) == 1:
        return json_number(value[0])
    return parse_number(value) if isinstance(value, str) else None


def keep_settings(builder: TableBuilder, record: Record, path: str = "", depth: int = 0) -> None:
    """Keep settings and summaries, which are no points of the run."""
    for name, value in record.items():
        whole = f"{path}/{name}" if path else str(name)
        if len(builder.settings) >= _MAX_SETTINGS:
            return
        if isinstance(value, dict) and depth < 2:
            keep_settings(builder, value, whole, depth + 1)
        elif isinstance(value, bool):
            builder.settings[whole] = float(value)
        elif isinstance(value, str) and len(value) <= 200:
            builder.settings[whole] = value
        elif isinstance(value, int | float) and (converted := json_number(value)) is not None:
            builder.settings[whole] = converted
