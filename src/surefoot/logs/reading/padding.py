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

from surefoot.logs.reading.meaning import Role, meaning, words_of
from surefoot.logs.table import Column, Table

_COUNTERS = frozenset({Role.STEP, Role.INNER, Role.EPOCH})
_INDEX = frozenset({"", "index", "unnamed: 0", "row", "#", "id"})
_KNOWN = frozenset({Role.RATE, Role.SCALE, Role.SKIPPED, Role.SPEED, Role.SECONDS, Role.MEMORY})
_CLOCKS = frozenset({"time", "timestamp", "date", "walltime", "elapsed", "seconds"})
FILLED = 0.95
"""Share of the records with numbers that a column has to be filled in to be missed in another."""


@dataclass(frozen=True, slots=True)
class Witnesses:
    """Columns that are filled even where the loss is NaN."""

    counters: frozenset[str]
    """Steps and indices, which may be written ahead of the run."""
    known: frozenset[str]
    """What only a run that goes on can tell: its learning rate, its clock, its memory."""


def witnesses(names: Iterable[str]) -> Witnesses:
    """The columns among these that tell a record of a run from an empty one."""
    found = {name: meaning(name).role for name in names}
    counters = {name for name, role in found.items() if role in _COUNTERS or name.strip().lower() in _INDEX}
    known = {name for name, role in found.items() if role in _KNOWN or _CLOCKS & set(words_of(name))}
    return Witnesses(frozenset(counters), frozenset(known - counters))


def without_padding(table: Table) -> Table:
    """The table without the records that are padding; the same one where there are none."""
    columns = table.columns
    found = witnesses(columns)
    numbers = {name: column.rows[~np.isnan(column.values)] for name, column in columns.items()}
    live = _marked(table.records, (rows for name, rows in numbers.items() if name not in found.counters))
    if live.all() or not live.any():
        return table
    counted = _marked(table.records, (numbers[name] for name in found.counters))
    padding = np.zeros(table.records, dtype=np.bool_)
    for name in found.counters | found.known:
        if live[numbers[name]].sum() >= FILLED * live.sum():
            missing = columns[name].rows[np.isnan(columns[name].values)]
            padding[missing] |= ~live[missing] & (~counted[missing] | (name in found.known))
    if not padding.any():
        return table
    kept = {name: _without(column, padding) for name, column in columns.items()}
    note = f"{int(padding.sum()):,} records without any number were left out as padding"
    return replace(
        table, columns={name: column for name, column in kept.items() if len(column)}, notes=(*table.notes, note)
    )


def padded_from(table: Table, first: int) -> bool:
    """Whether the records from here to the end, which have no losses, are padding and not losses that were NaN."""
    found = witnesses(table.columns)
    if not (found.counters or found.known):
        return False
    going_on = {name for name, column in table.columns.items() if _has_numbers(column, first)}
    if going_on - found.counters:
        return False
    filled = {name for name in found.known if len(table.columns[name]) >= FILLED * first}
    return bool(filled) or not going_on


def _has_numbers(column: Column, first: int) -> bool:
    return bool((~np.isnan(column.values[column.rows >= first])).any())


def _marked(records: int, groups: Iterable[NDArray[np.int64]]) -> NDArray[np.bool_]:
    marked = np.zeros(records, dtype=np.bool_)
    for rows in groups:
        marked[rows] = True
    return marked


def _without(column: Column, padding: NDArray[np.bool_]) -> Column:
    kept = ~padding[column.rows]
    return Column(column.rows[kept], column.values[kept])
