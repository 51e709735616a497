"""Assigns a step to every record of a table, and finds where a new run starts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from surefoot.logs.formats.metric_names import MetricName, MetricRole, split_words
from surefoot.logs.run_curves import Floats
from surefoot.logs.table import LogColumn, LogTable

MIN_COVERAGE = 0.6
"""Share of the loss records that must have a counter for it to be used."""
THINNED_LENGTH = 200_000
"""Longer columns may have been thinned, each at different records."""
MAX_ROW_DISTANCE = 32
"""Distance in records within which a counter of a thinned column is still used."""


@dataclass(frozen=True, slots=True)
class StepIndex:
    """The step of every record, and the runs in the table."""

    unit: str
    rows: NDArray[np.int64]
    steps: Floats
    runs: tuple[tuple[int, int], ...]
    """First record and end of each run."""
    repeated: NDArray[np.bool_]
    """Per entry of `rows`: repeated after a resume from an earlier step."""
    notes: tuple[str, ...] = ()
    counter: LogColumn | None = None
    """The column of the steps, if the log has one."""


def build_step_index(
    table: LogTable, known: Mapping[str, MetricName], rows: NDArray[np.int64], wanted: str | None
) -> StepIndex:
    """Build the step index of the records that have a loss."""
    counters = _find_counters(table, known, rows, wanted)
    for name in counters:
        role = MetricRole.STEP if name == wanted else known[name].role
        steps = counter_at(table.columns[name], rows)
        if role is MetricRole.EPOCH_STEP or (role is MetricRole.STEP and _count_restarts(steps) > 1):
            nested = _index_within_epochs(table, known, counters, name, rows)
            if nested is not None:
                return nested
        if role is not MetricRole.EPOCH_STEP and _is_counter(steps):
            clock = _index_by_counter(rows, steps, "epoch" if role is MetricRole.EPOCH else "step")
            return replace(clock, counter=table.columns[name])
    return _index_by_record(table, known, rows)


def _find_counters(
    table: LogTable, known: Mapping[str, MetricName], rows: NDArray[np.int64], wanted: str | None
) -> list[str]:
    """Counter columns for these records, the best first."""
    order = {MetricRole.STEP: 0, MetricRole.EPOCH: 1, MetricRole.EPOCH_STEP: 2}
    able = [
        name
        for name, what in known.items()
        if what.role in order
        and coverage(table.columns[name], rows) >= MIN_COVERAGE
        and not (what.is_eval and rows.size)
    ]
    able.sort(
        key=lambda name: (order[known[name].role], "global" not in split_words(name), len(split_words(name)), len(name))
    )
    return [wanted, *able] if wanted else able


def coverage(column: LogColumn, rows: NDArray[np.int64]) -> float:
    """Share of the records that have a counter; for thinned columns, that have one nearby."""
    if not len(rows):
        return 0.0
    if len(rows) < THINNED_LENGTH:
        return float(np.isin(rows, column.rows).mean())
    index = np.clip(np.searchsorted(column.rows, rows, side="right") - 1, 0, None)
    return float((np.abs(rows - column.rows[index]) <= MAX_ROW_DISTANCE).mean())


def counter_at(column: LogColumn, rows: NDArray[np.int64]) -> Floats:
    """A counter's values at the given records, carried forward where it was not logged."""
    finite = np.isfinite(column.values)
    have, values = column.rows[finite], column.values[finite]
    if not len(have):
        return np.full(len(rows), np.nan)
    index = np.clip(np.searchsorted(have, rows, side="right") - 1, 0, None)
    if len(have) < THINNED_LENGTH:
        return values[index]
    # Every column may be thinned at other records: between two of them a counter moved evenly, unless it went back.
    ahead = values[np.minimum(index + 1, len(values) - 1)] >= values[index]
    return np.where(ahead, np.round(np.interp(rows, have, values), 6), values[index])


def _is_counter(steps: Floats) -> bool:
    """Whether numbers increase as a counter does: nearly always, or in long stretches."""
    if len(steps) < 2 or not np.isfinite(steps).all():
        return len(steps) == 1
    ahead = np.diff(steps)
    moved = ahead[ahead != 0]
    if not len(moved) or len(moved) < 0.5 * len(ahead):
        return False  # constant, or one number for many records
    if np.any(steps != np.round(steps)) and np.ptp(steps) < len(steps) / 2:
        return False  # fractions of an epoch
    return float((moved > 0).mean()) > 0.9


def _count_restarts(steps: Floats) -> int:
    """How often a counter returns to its start."""
    if len(steps) < 2:
        return 0
    low, high = np.nanmin(steps), np.nanmax(steps)
    return int(np.sum((np.diff(steps) < 0) & (steps[1:] <= low + 0.1 * (high - low))))


def _index_within_epochs(
    table: LogTable, known: Mapping[str, MetricName], counters: Iterable[str], name: str, rows: NDArray[np.int64]
) -> StepIndex | None:
    """A counter within epochs: records are numbered; a restart without a new epoch starts a new run."""
    inner = counter_at(table.columns[name], rows)
    outer = next((counter for counter in counters if known[counter].role is MetricRole.EPOCH), None)
    if outer is None and known[name].role is not MetricRole.EPOCH_STEP:
        return None
    epoch = counter_at(table.columns[outer], rows) if outer else np.zeros(len(rows))
    back = np.diff(inner) < 0
    ahead = np.diff(epoch) > 0
    fresh = (np.diff(epoch) < 0) | (back & ~ahead & (outer is not None))
    if not np.any(back):
        return None
    steps = np.arange(1, len(rows) + 1, dtype=np.float64)
    starts = [0, *(np.flatnonzero(fresh) + 1).tolist()]
    return _build_index(rows, steps, starts, "point")


def _index_by_record(table: LogTable, known: Mapping[str, MetricName], rows: NDArray[np.int64]) -> StepIndex:
    """Number the records, as no counter moves with each of them; an epoch that goes back starts a new run."""
    steps = np.arange(1, len(rows) + 1, dtype=np.float64)
    starts = [0]
    names = [name for name, what in known.items() if what.role is MetricRole.EPOCH and not what.is_eval]
    for name in names:
        if coverage(table.columns[name], rows) >= MIN_COVERAGE:
            epoch = counter_at(table.columns[name], rows)
            starts += (np.flatnonzero((np.diff(epoch) < 0) & (epoch[1:] <= epoch[0])) + 1).tolist()
            break
    return _build_index(rows, steps, starts, "point")


def _index_by_counter(rows: NDArray[np.int64], steps: Floats, unit: str) -> StepIndex:
    """Steps that go back to the start begin a new run; steps that go back further in were repeated after a resume."""
    starts = [0]
    dropped = np.zeros(len(steps), dtype=bool)
    notes: list[str] = []
    begin = 0
    for index in np.flatnonzero(np.diff(steps) < 0) + 1:
        first = steps[begin]
        spacing = np.median(np.abs(np.diff(steps[begin:index]))) if index - begin > 2 else 0.0
        if steps[index] <= first + 2 * spacing:
            starts.append(int(index))
            begin = int(index)
        elif index - begin > 1 and steps[index] < steps[begin:index].max() - 2 * spacing:
            again = steps[begin:index] >= steps[index]
            dropped[begin:index] |= again
            notes.append(
                f"the log goes back from {unit} {steps[index - 1]:g} to {steps[index]:g}: repeated steps count"
                " from the second pass"
            )
    clock = _build_index(rows, steps, starts, unit)
    kept = tuple(notes[:3]) + ((f"and {len(notes) - 3} times more",) if len(notes) > 3 else ())
    return replace(clock, repeated=dropped, notes=kept)


def _build_index(rows: NDArray[np.int64], steps: Floats, starts: list[int], unit: str) -> StepIndex:
    limits = [0, *(int(rows[start]) for start in starts[1:]), int(np.iinfo(np.int64).max)]
    parts = tuple(itertools.pairwise(limits))
    return StepIndex(unit, rows, steps, parts, np.zeros(len(rows), dtype=bool))
