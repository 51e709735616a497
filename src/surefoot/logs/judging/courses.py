"""The courses of the runs in a table: loss, evaluation, norm, rate and scale, found by their meaning."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from surefoot.logs.course import RunCurves, Series, empty_series
from surefoot.logs.judging.clock import MIN_COVERAGE, StepIndex, counter_at, build_step_index, coverage
from surefoot.logs.reading.meaning import MetricName, MetricRole, parse_metric_name, split_words
from surefoot.logs.table import LogColumn, LogTable, UnreadableInput

MIN_SHARE = 0.3
"""A loss with fewer values than this share of another's is a summary of it."""
ADVERSARIAL_WORDS = frozenset({"g", "d", "gen", "disc", "generator", "discriminator", "critic", "adversarial", "adv", "actor"})
"""Words of losses that play against each other: their sum means nothing."""
COLUMN_ROLES = ("step", "loss", "eval_loss", "norm", "rate", "scale")
"""Roles for which a column can be named."""


def extract_curves(table: LogTable, columns: Mapping[str, str] | None = None) -> list[RunCurves]:
    """The runs that stand in a table, one after the other; more than one where counters began anew.

    `columns` names columns by role (`OPTIONS`) where they are not to be found by meaning.
    """
    if strange := set(columns or ()) - set(COLUMN_ROLES):
        raise UnreadableInput(f"columns are named by role: {', '.join(COLUMN_ROLES)}, not {', '.join(sorted(strange))}")
    wanted = {role: _named(table, name) for role, name in (columns or {}).items()}
    known = {name: parse_metric_name(name) for name in table.columns}
    traces = _traces(table, known, wanted)
    if not any(len(column) for column in traces.values()):
        return []
    main = next(column for role, column in traces.items() if len(column))
    clock = build_step_index(table, known, main.column.rows, wanted.get("step"))
    return [_cut(traces, clock, part) for part in clock.runs]


def _named(table: LogTable, name: str) -> str:
    if name in table.columns:
        return name
    near = difflib.get_close_matches(name, list(table.columns), 1, 0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    there = ", ".join(sorted(table.columns)[:40])
    raise UnreadableInput(f"{table.path} has no column {name!r}{hint} There are: {there}")


@dataclass(frozen=True, slots=True)
class _Found:
    """A column, or several added up, under the name to be told."""

    name: str
    column: LogColumn

    def __len__(self) -> int:
        return len(self.column)


def _traces(table: LogTable, known: Mapping[str, MetricName], wanted: Mapping[str, str]) -> dict[str, _Found]:
    """The columns to look at by role, the loss first."""
    found: dict[str, _Found] = {}

    def of(role: str, column: _Found | None) -> None:
        if role in wanted:
            column = _Found(wanted[role], table.columns[wanted[role]])
        if column is not None and len(column):
            found[role] = column

    of("loss", _loss(table, known, held_out=False))
    of("eval_loss", _loss(table, known, held_out=True))
    if "loss" not in found and "eval_loss" in found:
        found = {"loss": found["eval_loss"]}
    if "loss" not in found:
        loss, eval_loss = _stand_ins(table, known)
        of("loss", loss)
        of("eval_loss", eval_loss)
    of("norm", _longest(table, known, MetricRole.GRAD_NORM))
    of("rate", _longest(table, known, MetricRole.LR))
    of("scale", _longest(table, known, MetricRole.LOSS_SCALE))
    for role in (MetricRole.SKIPPED, MetricRole.ACCURACY, MetricRole.REWARD, MetricRole.SPEED, MetricRole.SECONDS, MetricRole.MEMORY):
        of(str(role), _longest(table, known, role))
    of("eval_accuracy", _longest(table, known, MetricRole.ACCURACY, held_out=True))
    for name, column in _rivals(table, known).items():
        of(f"rival:{name}", _Found(name, column))
    return found


def _loss(table: LogTable, known: Mapping[str, MetricName], *, held_out: bool) -> _Found | None:
    """The loss as a whole; where only its terms were logged, their sum."""
    mine = {name: what for name, what in known.items() if what.role is MetricRole.LOSS and what.is_eval is held_out}
    if held_out and any(not what.is_test for what in mine.values()):
        mine = {name: what for name, what in mine.items() if not what.is_test}
    whole = {name: table.columns[name] for name, what in mine.items() if not what.term}
    terms = {name: table.columns[name] for name, what in mine.items() if what.term}
    most = max((len(column) for column in (*whole.values(), *terms.values())), default=0)
    whole = {name: column for name, column in whole.items() if len(column) >= MIN_SHARE * most or len(column) > 50}
    if whole:
        name = max(whole, key=lambda name: (len(whole[name]), _plainness(name)))
        return _Found(name, whole[name])
    if not terms:
        return None
    if len(terms) == 1 or any(ADVERSARIAL_WORDS & set(split_words(name)) for name in terms):
        name = max(terms, key=lambda name: len(terms[name]))
        return _Found(name, terms[name])
    return _sum(terms)


def _plainness(name: str) -> tuple[bool, int]:
    """Of columns with as many values, the mean over an epoch says more than a single batch; then the shortest name."""
    words = split_words(name)
    return "epoch" in words, -len(words)


def _sum(terms: Mapping[str, LogColumn]) -> _Found:
    """Terms of one loss that stand in the same records, added up."""
    most = max(len(column) for column in terms.values())
    together = {name: column for name, column in terms.items() if len(column) == most}
    first = next(iter(together.values()))
    together = {name: column for name, column in together.items() if np.array_equal(column.rows, first.rows)}
    with np.errstate(invalid="ignore", over="ignore"):
        total = np.sum([column.values for column in together.values()], axis=0)
    return _Found(" + ".join(together), LogColumn(first.rows, total))


def _stand_ins(table: LogTable, known: Mapping[str, MetricName]) -> tuple[_Found | None, _Found | None]:
    """Where no loss was logged: perplexity, as its logarithm, or an error; of training, and of other data beside it."""
    for role in (MetricRole.PERPLEXITY, MetricRole.ERROR):
        found = [_longest(table, known, role, held_out=held_out) for held_out in (False, True)]
        if role is MetricRole.PERPLEXITY:
            found = [_logarithm(one) if one is not None else None for one in found]
        if any(found):
            return (found[0], found[1]) if found[0] else (found[1], None)
    return None, None


def _logarithm(found: _Found) -> _Found:
    with np.errstate(divide="ignore", invalid="ignore"):
        return _Found(f"log of {found.name}", LogColumn(found.column.rows, np.log(found.column.values)))


def _longest(table: LogTable, known: Mapping[str, MetricName], role: MetricRole, *, held_out: bool = False) -> _Found | None:
    names = [name for name, what in known.items() if what.role is role and what.is_eval is held_out]
    if role is MetricRole.REWARD:
        names = [name for name in names if not {"chosen", "rejected", "margins", "std"} & set(split_words(name))]
    if not names:
        return None
    name = max(names, key=lambda name: (len(table.columns[name]), -len(name)))
    return _Found(name, table.columns[name])


def _rivals(table: LogTable, known: Mapping[str, MetricName]) -> dict[str, LogColumn]:
    """The losses of a game, when there are at least two."""
    names = [
        name
        for name, what in known.items()
        if what.role is MetricRole.LOSS and not what.is_eval and what.term.split() and set(what.term.split()) <= ADVERSARIAL_WORDS
    ]
    return {name: table.columns[name] for name in names} if len(names) > 1 else {}


def _cut(traces: Mapping[str, _Found], clock: StepIndex, part: tuple[int, int]) -> RunCurves:
    """One run out of a table."""
    made = {role: _trace(found, clock, part) for role, found in traces.items()}
    main = {role: made.pop(role, empty_series()) for role in ("loss", "eval_loss", "norm", "rate", "scale")}
    others = {role: trace for role, trace in made.items() if len(trace)}
    return RunCurves(**main, others=others, unit=clock.unit, notes=clock.notes)


def _trace(found: _Found, clock: StepIndex, part: tuple[int, int]) -> Series:
    column = found.column
    mine = (column.rows >= part[0]) & (column.rows < part[1])
    rows, values = column.rows[mine], column.values[mine]
    index = np.clip(np.searchsorted(clock.rows, rows, side="right") - 1, 0, len(clock.rows) - 1)
    inside = (clock.rows[index] >= part[0]) & (clock.rows[index] < part[1])
    first = int(np.searchsorted(clock.rows, part[0]))
    index = np.where(inside, index, min(first, len(clock.rows) - 1))
    steps = clock.steps[index]
    if clock.counter is not None and coverage(clock.counter, rows) >= MIN_COVERAGE:
        steps = counter_at(clock.counter, rows)
    kept = ~clock.repeated[index]
    return Series(found.name, steps[kept], values[kept])
