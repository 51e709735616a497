"""Records that hold nothing: a table was made longer than its run, or has empty records between the others.

A run whose loss is NaN still knows its step, its learning rate and its clock. So a record without any number is padding
where the log says these in its other records and not in this one:
- it has no number at all, not even a step or an index, or
- only its step or its index goes on, and a learning rate, a time or a memory that all other records have is missing.
A record with a step and a NaN for everything that may turn NaN (loss, norm, accuracy) is a failure and stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from surefoot.logs.reading.meaning import MetricRole, parse_metric_name, split_words
from surefoot.logs.table import LogColumn, LogTable

_COUNTERS = frozenset({MetricRole.STEP, MetricRole.EPOCH_STEP, MetricRole.EPOCH})
_INDEX = frozenset({"", "index", "unnamed: 0", "row", "#", "id"})
_RUN_STATE = frozenset({MetricRole.LR, MetricRole.LOSS_SCALE, MetricRole.SKIPPED, MetricRole.SPEED, MetricRole.SECONDS, MetricRole.MEMORY})
_CLOCKS = frozenset({"time", "timestamp", "date", "walltime", "elapsed", "seconds"})
MIN_FILLED = 0.95
"""Share of the records with numbers that a column has to be filled in to be missed in another."""


@dataclass(frozen=True, slots=True)
class ReferenceColumns:
    """Columns that are filled even where the loss is NaN."""

    counters: frozenset[str]
    """Steps and indices, which may be written ahead of the run."""
    run_state: frozenset[str]
    """What only a run that goes on can tell: its learning rate, its clock, its memory."""


def reference_columns(names: Iterable[str]) -> ReferenceColumns:
    """The columns among these that tell a record of a run from an empty one."""
    found = {name: parse_metric_name(name).role for name in names}
    counters = {name for name, role in found.items() if role in _COUNTERS or name.strip().lower() in _INDEX}
    known = {name for name, role in found.items() if role in _RUN_STATE or _CLOCKS & set(split_words(name))}
    return ReferenceColumns(frozenset(counters), frozenset(known - counters))


def drop_padding(table: LogTable) -> LogTable:
    """The table without the records that are padding; the same one where there are none."""
    columns = table.columns
    found = reference_columns(columns)
    numbers = {name: column.rows[~np.isnan(column.values)] for name, column in columns.items()}
    live = _mask(table.records, (rows for name, rows in numbers.items() if name not in found.counters))
    if live.all() or not live.any():
        return table
    counted = _mask(table.records, (numbers[name] for name in found.counters))
    padding = np.zeros(table.records, dtype=np.bool_)
    for name in found.counters | found.run_state:
        if live[numbers[name]].sum() >= MIN_FILLED * live.sum():
            missing = columns[name].rows[np.isnan(columns[name].values)]
            padding[missing] |= ~live[missing] & (~counted[missing] | (name in found.run_state))
    if not padding.any():
        return table
    kept = {name: _drop_rows(column, padding) for name, column in columns.items()}
    note = f"{int(padding.sum()):,} records without any number were left out as padding"
    return replace(
        table, columns={name: column for name, column in kept.items() if len(column)}, notes=(*table.notes, note)
    )


def is_padding_from(table: LogTable, first: int) -> bool:
    """Whether the records from here to the end, which have no losses, are padding and not losses that were NaN."""
    found = reference_columns(table.columns)
    if not (found.counters or found.run_state):
        return False
    going_on = {name for name, column in table.columns.items() if _has_numbers(column, first)}
    if going_on - found.counters:
        return False
    filled = {name for name in found.run_state if len(table.columns[name]) >= MIN_FILLED * first}
    return bool(filled) or not going_on


def _has_numbers(column: LogColumn, first: int) -> bool:
    return bool((~np.isnan(column.values[column.rows >= first])).any())


def _mask(records: int, groups: Iterable[NDArray[np.int64]]) -> NDArray[np.bool_]:
    marked = np.zeros(records, dtype=np.bool_)
    for rows in groups:
        marked[rows] = True
    return marked


def _drop_rows(column: LogColumn, padding: NDArray[np.bool_]) -> LogColumn:
    kept = ~padding[column.rows]
    return LogColumn(column.rows[kept], column.values[kept])
