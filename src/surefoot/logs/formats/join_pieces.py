"""Joins the pieces of one run: files that go on where others ended, after a restart or in parts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from surefoot.logs.formats.metric_names import MetricRole, parse_metric_name
from surefoot.logs.table import MAX_TAIL_CHARS, MAX_VALUES, LogColumn, LogTable

MAX_GAP = 0.05
"""A piece begins at most this share of the run after the end of the one before."""
MIN_GAP_STRIDES = 20
"""Or so many times its distance between steps."""
T = TypeVar("T")


def join_tables(first: LogTable | None, second: LogTable) -> LogTable:
    """One table of two that follow each other."""
    if first is None:
        return second
    columns = dict(first.columns)
    for name, column in second.columns.items():
        rows, values = column.rows + first.records, column.values
        if (earlier := columns.get(name)) is not None:
            rows, values = np.concatenate([earlier.rows, rows]), np.concatenate([earlier.values, values])
        columns[name] = LogColumn(rows, values)
    skipped = {
        why: first.skipped.get(why, 0) + second.skipped.get(why, 0) for why in {**first.skipped, **second.skipped}
    }
    return replace(
        second,
        records=first.records + second.records,
        columns=columns,
        skipped=skipped,
        notes=tuple(dict.fromkeys((*first.notes, *second.notes))),
        tail=(first.tail + second.tail)[-MAX_TAIL_CHARS:],
        settings={**first.settings, **second.settings},
    )


@dataclass(frozen=True, slots=True)
class _Steps:
    """The steps that a table covers."""

    first: float
    last: float
    stride: float


def group_pieces(items: Sequence[T], path: Callable[[T], Path], table: Callable[[T], LogTable]) -> list[list[T]]:
    """Items whose paths differ in numbers only and whose steps go on from one to the next, each group in order."""
    by_name: dict[tuple[str, str], list[T]] = defaultdict(list)
    for item in items:
        by_name[re.sub(r"\d+", "#", str(path(item))), table(item).format].append(item)
    groups: list[list[T]] = []
    for alike in by_name.values():
        alike = sorted(alike, key=lambda item: _natural(str(path(item))))
        orders = (alike, sorted(alike, key=lambda item: _first_step(table(item))))
        whole = next((order for order in orders if _go_on([table(item) for item in order])), None)
        groups += [whole] if whole is not None else [[item] for item in alike]
    return groups


def _natural(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path)]


def _first_step(table: LogTable) -> float:
    steps = _steps(table)
    return steps.first if steps else 0.0


def _steps(table: LogTable) -> _Steps | None:
    roles = {name: parse_metric_name(name).role for name in table.columns}
    names = [name for name, role in roles.items() if role is MetricRole.STEP]
    if not names or not any(role in (MetricRole.LOSS, MetricRole.PERPLEXITY) for role in roles.values()):
        return None
    values = table.columns[max(names, key=lambda name: len(table.columns[name]))].values
    values = values[np.isfinite(values)]
    if len(values) < 2:
        return None
    return _Steps(float(values[0]), float(values.max()), float(np.median(np.abs(np.diff(values)))))


def _go_on(tables: Sequence[LogTable]) -> bool:
    """Whether each table begins within or shortly after those before it, and ends later than they did."""
    covered = [_steps(table) for table in tables]
    if len(tables) < 2 or sum(len(column) for table in tables for column in table.columns.values()) > 4 * MAX_VALUES:
        return False
    reached: _Steps | None = None
    for steps in covered:
        if steps is None:
            return False
        if reached is not None:
            gap = max(MAX_GAP * (reached.last - reached.first), MIN_GAP_STRIDES * max(steps.stride, reached.stride))
            afresh = steps.first <= reached.first + 2 * max(steps.stride, reached.stride)
            if afresh or steps.first > reached.last + gap or steps.last <= reached.last:
                return False
            steps = _Steps(reached.first, steps.last, max(steps.stride, reached.stride))
        reached = steps
    return True
