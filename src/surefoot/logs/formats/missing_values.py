"""Tells missing values from NaN, and drops padding records.

Formats with a cell for every value fill the cells of values that were not measured: mostly with nothing, sometimes with
NaN. Writers that cannot express NaN (pandas, strict JSON) leave the cell of a true NaN empty.

NaN is filler in a column that is filled in every record, in a log that leaves no cell empty elsewhere, if
- its numbers come at regular distances of two records or more (an evaluation every n-th record); a NaN where the next
  number was due is a true NaN, or
- another column has a number in that record, the two never have one in the same record, and they alternate
  (training records and evaluation records).
An empty cell means NaN in a loss column that was filled in every record and is empty from some record to the end.

Padding: a run whose loss is NaN still has a step, a learning rate and a clock. So a record without any number is
padding if the other records have these and this one does not:
- it has no number at all, not even a step or an index, or
- only its step or index continues, and a learning rate, time or memory that all other records have is missing.
A record with a step and NaN for everything that can become NaN (loss, norm, accuracy) is a failure and stays, unless
such records stand alone and come at regular distances (an evaluation was merged into the log), or repeat the step of
the record before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from surefoot.logs.formats.metric_names import MetricRole, parse_metric_name, split_words
from surefoot.logs.table import THINNED_NOTE, LogColumn, LogTable

_LOSSES = ("loss", "nll", "cost", "objective")
_MAX_COMPARED = 64
Bools = NDArray[np.bool_]


def resolve_missing(table: LogTable, voids: Mapping[str, tuple[int, int]]) -> LogTable:
    """Drop filler NaN and padding, and restore NaN that were left empty."""
    if THINNED_NOTE in table.notes:
        return table
    table = drop_padding(table)
    changed, notes = _drop_filler(table)
    if not changed:
        changed, notes = _restore_nan(table, voids)
    if not changed:
        return table
    return replace(table, columns={**table.columns, **changed}, notes=(*table.notes, *notes))


def _drop_filler(table: LogTable) -> tuple[dict[str, LogColumn], list[str]]:
    if any(len(column) < 0.9 * table.records for column in table.columns.values()):
        return {}, []  # this log can leave cells empty
    numbers = {name: ~np.isnan(column.values) for name, column in table.columns.items()}
    holed = {name: present for name, present in numbers.items() if 1 < present.sum() < 0.95 * len(present)}
    if not holed:
        return {}, []
    changed: dict[str, LogColumn] = {}
    for name, present in holed.items():
        column = table.columns[name]
        filler = _regular_filler(present)
        if filler is None:
            filler = _alternating_filler(
                present, [other for other in list(holed.values())[:_MAX_COMPARED] if len(other) == len(present)]
            )
        if filler is not None and filler.any():
            changed[name] = LogColumn(column.rows[~filler], column.values[~filler])
    names = ", ".join(list(changed)[:3]) + (" and others" if len(changed) > 3 else "")
    return changed, [f"NaN between the values of {names} was read as not measured"] if changed else []


def _regular_filler(present: Bools) -> Bools | None:
    """Filler of a column whose numbers come every n-th record."""
    at = np.flatnonzero(present)
    if len(at) < 3:
        return None
    apart = np.diff(at)
    interval = int(np.median(apart))
    even = np.abs(apart - interval) <= max(1, interval // 50)
    if interval < 2 or even.mean() < 0.8:
        return None
    filler = ~present
    due = np.arange(at[-1] + interval, len(present), interval)
    if len(due) > 1 or bool((apart == interval).all()):
        filler[due] = False
    return filler


def _alternating_filler(present: Bools, others: list[Bools]) -> Bools | None:
    """Filler of a column that has numbers only in records in which others have none."""
    filler = np.zeros(len(present), dtype=np.bool_)
    begins = np.flatnonzero(np.diff(present.astype(np.int8), prepend=0) > 0)
    if len(begins) < 2:
        return None
    for other in others:
        if not (present & other).any() and other[begins[0] : begins[-1]].any():
            filler |= other & ~present
    return filler


def _restore_nan(table: LogTable, voids: Mapping[str, tuple[int, int]]) -> tuple[dict[str, LogColumn], list[str]]:
    changed: dict[str, LogColumn] = {}
    notes: list[str] = []
    losses = [name for name in table.columns if any(word in name.lower() for word in _LOSSES)]
    for name, (first, count) in voids.items():
        if not any(word in name.lower() for word in _LOSSES) or count < 3 or count < 0.9 * (table.records - first):
            continue
        if is_padding_from(table, first):
            continue
        column = table.columns.get(name)
        if column is None:
            if losses or count < 0.9 * table.records:
                continue
            column = LogColumn(np.empty(0, dtype=np.int64), np.empty(0))
        elif len(column) < 3 or len(column) < 0.95 * first:
            continue
        rows = np.arange(first, table.records, dtype=np.int64)
        changed[name] = LogColumn(
            np.concatenate([column.rows, rows]), np.concatenate([column.values, np.full(len(rows), np.nan)])
        )
        notes.append(f"{name} is empty from record {first + 1} to the end: read as NaN, which some writers leave out")
    return changed, notes


_COUNTERS = frozenset({MetricRole.STEP, MetricRole.EPOCH_STEP, MetricRole.EPOCH})
_INDEX = frozenset({"", "index", "unnamed: 0", "row", "#", "id"})
_RUN_STATE = frozenset(
    {MetricRole.LR, MetricRole.LOSS_SCALE, MetricRole.SKIPPED, MetricRole.SPEED, MetricRole.SECONDS, MetricRole.MEMORY}
)
_CLOCKS = frozenset({"time", "timestamp", "date", "walltime", "elapsed", "seconds"})
MIN_REGULAR, REGULAR_SHARE = 4, 0.9
"""So many records of NaN only, this share of them at one distance, are no accident."""
MIN_FILLED = 0.95
"""Share of the records with numbers in which a column has to be filled for its absence to count."""


@dataclass(frozen=True, slots=True)
class ReferenceColumns:
    """Columns that are filled even when the loss is NaN."""

    counters: frozenset[str]
    """Steps and indices, which may be written ahead of the run."""
    run_state: frozenset[str]
    """Written only while the run continues: learning rate, clock, memory."""


def reference_columns(names: Iterable[str]) -> ReferenceColumns:
    """The columns that distinguish a record of a run from an empty one."""
    roles = {name: parse_metric_name(name).role for name in names}
    counters = {name for name, role in roles.items() if role in _COUNTERS or name.strip().lower() in _INDEX}
    known = {name for name, role in roles.items() if role in _RUN_STATE or _CLOCKS & set(split_words(name))}
    return ReferenceColumns(frozenset(counters), frozenset(known - counters))


def drop_padding(table: LogTable) -> LogTable:
    """Drop padding records; returns the same table if there are none."""
    columns = table.columns
    references = reference_columns(columns)
    numbers = {name: column.rows[~np.isnan(column.values)] for name, column in columns.items()}
    live = _mask(table.records, (rows for name, rows in numbers.items() if name not in references.counters))
    if live.all() or not live.any():
        return table
    counted = _mask(table.records, (numbers[name] for name in references.counters))
    padding = np.zeros(table.records, dtype=np.bool_)
    for name in references.counters | references.run_state:
        if live[numbers[name]].sum() >= MIN_FILLED * live.sum():
            missing = columns[name].rows[np.isnan(columns[name].values)]
            padding[missing] |= ~live[missing] & (~counted[missing] | (name in references.run_state))
    padding |= _alone_and_regular(table, live) | _repeats_step(table, references, live)
    if not padding.any():
        return table
    kept = {name: _drop_rows(column, padding) for name, column in columns.items()}
    note = f"{int(padding.sum()):,} records without any number were left out as padding"
    return replace(
        table, columns={name: column for name, column in kept.items() if len(column)}, notes=(*table.notes, note)
    )


def _alone_and_regular(table: LogTable, live: Bools) -> Bools:
    """Records of NaN only, each between two with numbers, at equal distances."""
    none = np.zeros(table.records, dtype=np.bool_)
    at = np.flatnonzero(~live & _mask(table.records, (column.rows for column in table.columns.values())))
    at = at[at < np.flatnonzero(live)[-1]]
    if len(at) < MIN_REGULAR or np.diff(at).min() < 2:
        return none
    apart = np.diff(at)
    if (apart == np.median(apart)).mean() >= REGULAR_SHARE:
        none[at] = True
    return none


def _repeats_step(table: LogTable, references: ReferenceColumns, live: Bools) -> Bools:
    """Records of NaN only, with the same step as the record with numbers before them."""
    repeated = np.zeros(table.records, dtype=np.bool_)
    for name in references.counters:
        column = table.columns[name]
        if parse_metric_name(name).role is not MetricRole.STEP or len(column) < table.records:
            continue
        same = np.flatnonzero(np.diff(column.values) == 0) + 1
        repeated[same] |= ~live[same] & live[same - 1]
    return repeated


def is_padding_from(table: LogTable, first: int) -> bool:
    """Whether the records from `first` to the end, which have no losses, are padding rather than NaN losses."""
    references = reference_columns(table.columns)
    if not (references.counters or references.run_state):
        return False
    going_on = {name for name, column in table.columns.items() if _has_numbers(column, first)}
    if going_on - references.counters:
        return False
    filled = {name for name in references.run_state if len(table.columns[name]) >= MIN_FILLED * first}
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
