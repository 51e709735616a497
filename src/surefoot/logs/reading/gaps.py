"""Where a NaN means "nothing was measured", and where nothing means NaN.

A log that has a place for every value fills the places of those that were not measured: mostly with nothing, sometimes
with NaN. And a writer that has no word for NaN (pandas, strict JSON) leaves the place of a true NaN empty.

NaN is filler in a column that is filled in every record, in a log that leaves no place empty elsewhere, if
- its numbers come at regular distances of two records or more (an evaluation every n-th record); a NaN at a place
  where the next number was due is true, or
- another column has a number in that record, the two never have one in the same record, and they take turns
  (records of training and of evaluation).
Nothing means NaN in a column of losses that was filled in every record and is empty from some record to the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from surefoot.logs.reading.padding import is_padding_from, drop_padding
from surefoot.logs.table import THINNED_NOTE, LogColumn, LogTable

_LOSSES = ("loss", "nll", "cost", "objective")
_MAX_COMPARED = 64
Bools = NDArray[np.bool_]


def resolve_missing(table: LogTable, voids: Mapping[str, tuple[int, int]]) -> LogTable:
    """The table without its filler, and with the NaN that were left empty."""
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
        return {}, []  # this log knows how to leave a place empty
    numbers = {name: ~np.isnan(column.values) for name, column in table.columns.items()}
    holed = {name: there for name, there in numbers.items() if 1 < there.sum() < 0.95 * len(there)}
    if not holed:
        return {}, []
    found: dict[str, LogColumn] = {}
    for name, there in holed.items():
        column = table.columns[name]
        filler = _regular_filler(there)
        if filler is None:
            filler = _alternating_filler(there, [other for other in list(holed.values())[:_MAX_COMPARED] if len(other) == len(there)])
        if filler is not None and filler.any():
            found[name] = LogColumn(column.rows[~filler], column.values[~filler])
    names = ", ".join(list(found)[:3]) + (" and others" if len(found) > 3 else "")
    return found, [f"NaN between the values of {names} was read as not measured"] if found else []


def _regular_filler(there: Bools) -> Bools | None:
    """The filler of a column whose numbers come every n-th record."""
    at = np.flatnonzero(there)
    if len(at) < 3:
        return None
    apart = np.diff(at)
    each = int(np.median(apart))
    even = np.abs(apart - each) <= max(1, each // 50)
    if each < 2 or even.mean() < 0.8:
        return None
    filler = ~there
    due = np.arange(at[-1] + each, len(there), each)
    if len(due) > 1 or bool((apart == each).all()):
        filler[due] = False
    return filler


def _alternating_filler(there: Bools, others: list[Bools]) -> Bools | None:
    """The filler of a column that has numbers only in records in which others have none."""
    filler = np.zeros(len(there), dtype=np.bool_)
    begins = np.flatnonzero(np.diff(there.astype(np.int8), prepend=0) > 0)
    if len(begins) < 2:
        return None
    for other in others:
        if not (there & other).any() and other[begins[0] : begins[-1]].any():
            filler |= other & ~there
    return filler


def _restore_nan(table: LogTable, voids: Mapping[str, tuple[int, int]]) -> tuple[dict[str, LogColumn], list[str]]:
    found: dict[str, LogColumn] = {}
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
        found[name] = LogColumn(
            np.concatenate([column.rows, rows]), np.concatenate([column.values, np.full(len(rows), np.nan)])
        )
        notes.append(f"{name} is empty from record {first + 1} to the end: read as NaN, which some writers leave out")
    return found, notes
