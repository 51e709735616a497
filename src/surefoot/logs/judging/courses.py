"""The courses of the runs in a table: loss, evaluation, norm, rate and scale, found by their meaning."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from surefoot.logs.course import Course, Trace, nothing
from surefoot.logs.judging.clock import COVERED, Clock, at, clock_of, coverage
from surefoot.logs.reading.meaning import Meaning, Role, meaning, words_of
from surefoot.logs.table import Column, Table, Unreadable

FEWER = 0.3
"""A loss with fewer values than this share of another's is a summary of it."""
RIVALS = frozenset({"g", "d", "gen", "disc", "generator", "discriminator", "critic", "adversarial", "adv", "actor"})
"""Words of losses that play against each other: their sum means nothing."""
OPTIONS = ("step", "loss", "eval_loss", "norm", "rate", "scale")
"""Roles for which a column can be named."""


def courses(table: Table, columns: Mapping[str, str] | None = None) -> list[Course]:
    """The runs that stand in a table, one after the other; more than one where counters began anew.

    `columns` names columns by role (`OPTIONS`) where they are not to be found by meaning.
    """
    if strange := set(columns or ()) - set(OPTIONS):
        raise Unreadable(f"columns are named by role: {', '.join(OPTIONS)}, not {', '.join(sorted(strange))}")
    wanted = {role: _named(table, name) for role, name in (columns or {}).items()}
    known = {name: meaning(name) for name in table.columns}
    traces = _traces(table, known, wanted)
    if not any(len(column) for column in traces.values()):
        return []
    main = next(column for role, column in traces.items() if len(column))
    clock = clock_of(table, known, main.column.rows, wanted.get("step"))
    return [_cut(traces, clock, part) for part in clock.parts]


def _named(table: Table, name: str) -> str:
    if name in table.columns:
        return name
    near = difflib.get_close_matches(name, list(table.columns), 1, 0.4)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    there = ", ".join(sorted(table.columns)[:40])
    raise Unreadable(f"{table.path} has no column {name!r}{hint} There are: {there}")


@dataclass(frozen=True, slots=True)
class _Found:
    """A column, or several added up, under the name to be told."""

    name: str
    column: Column

    def __len__(self) -> int:
        return len(self.column)


def _traces(table: Table, known: Mapping[str, Meaning], wanted: Mapping[str, str]) -> dict[str, _Found]:
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
    of("norm", _longest(table, known, Role.NORM))
    of("rate", _longest(table, known, Role.RATE))
    of("scale", _longest(table, known, Role.SCALE))
    for role in (Role.SKIPPED, Role.ACCURACY, Role.REWARD, Role.SPEED, Role.SECONDS, Role.MEMORY):
        of(str(role), _longest(table, known, role))
    of("eval_accuracy", _longest(table, known, Role.ACCURACY, held_out=True))
    for name, column in _rivals(table, known).items():
        of(f"rival:{name}", _Found(name, column))
    return found


def _loss(table: Table, known: Mapping[str, Meaning], *, held_out: bool) -> _Found | None:
    """The loss as a whole; where only its terms were logged, their sum."""
    mine = {name: what for name, what in known.items() if what.role is Role.LOSS and what.held_out is held_out}
    if held_out and any(not what.test for what in mine.values()):
        mine = {name: what for name, what in mine.items() if not what.test}
    whole = {name: table.columns[name] for name, what in mine.items() if not what.part}
    terms = {name: table.columns[name] for name, what in mine.items() if what.part}
    most = max((len(column) for column in (*whole.values(), *terms.values())), default=0)
    whole = {name: column for name, column in whole.items() if len(column) >= FEWER * most or len(column) > 50}
    if whole:
        name = max(whole, key=lambda name: (len(whole[name]), _plainness(name)))
        return _Found(name, whole[name])
    if not terms:
        return None
    if len(terms) == 1 or any(RIVALS & set(words_of(name)) for name in terms):
        name = max(terms, key=lambda name: len(terms[name]))
        return _Found(name, terms[name])
    return _sum(terms)


def _plainness(name: str) -> tuple[bool, int]:
    """Of columns with as many values, the mean over an epoch says more than a single batch; then the shortest name."""
    words = words_of(name)
    return "epoch" in words, -len(words)


def _sum(terms: Mapping[str, Column]) -> _Found:
    """Terms of one loss that stand in the same records, added up."""
    most = max(len(column) for column in terms.values())
    together = {name: column for name, column in terms.items() if len(column) == most}
    first = next(iter(together.values()))
    together = {name: column for name, column in together.items() if np.array_equal(column.rows, first.rows)}
    with np.errstate(invalid="ignore", over="ignore"):
        total = np.sum([column.values for column in together.values()], axis=0)
    return _Found(" + ".join(together), Column(first.rows, total))


def _stand_ins(table: Table, known: Mapping[str, Meaning]) -> tuple[_Found | None, _Found | None]:
    """Where no loss was logged: perplexity, as its logarithm, or an error; of training, and of other data beside it."""
    for role in (Role.PERPLEXITY, Role.ERROR):
        found = [_longest(table, known, role, held_out=held_out) for held_out in (False, True)]
        if role is Role.PERPLEXITY:
            found = [_logarithm(one) if one is not None else None for one in found]
        if any(found):
            return (found[0], found[1]) if found[0] else (found[1], None)
    return None, None


def _logarithm(found: _Found) -> _Found:
    with np.errstate(divide="ignore", invalid="ignore"):
        return _Found(f"log of {found.name}", Column(found.column.rows, np.log(found.column.values)))


def _longest(table: Table, known: Mapping[str, Meaning], role: Role, *, held_out: bool = False) -> _Found | None:
    names = [name for name, what in known.items() if what.role is role and what.held_out is held_out]
    if role is Role.REWARD:
        names = [name for name in names if not {"chosen", "rejected", "margins", "std"} & set(words_of(name))]
    if not names:
        return None
    name = max(names, key=lambda name: (len(table.columns[name]), -len(name)))
    return _Found(name, table.columns[name])


def _rivals(table: Table, known: Mapping[str, Meaning]) -> dict[str, Column]:
    """The losses of a game, when there are at least two."""
    names = [
        name
        for name, what in known.items()
        if what.role is Role.LOSS and not what.held_out and what.part.split() and set(what.part.split()) <= RIVALS
    ]
    return {name: table.columns[name] for name in names} if len(names) > 1 else {}


def _cut(traces: Mapping[str, _Found], clock: Clock, part: tuple[int, int]) -> Course:
    """One run out of a table."""
    made = {role: _trace(found, clock, part) for role, found in traces.items()}
    main = {role: made.pop(role, nothing()) for role in ("loss", "eval_loss", "norm", "rate", "scale")}
    others = {role: trace for role, trace in made.items() if len(trace)}
    return Course(**main, others=others, unit=clock.unit, notes=clock.notes)


def _trace(found: _Found, clock: Clock, part: tuple[int, int]) -> Trace:
    column = found.column
    mine = (column.rows >= part[0]) & (column.rows < part[1])
    rows, values = column.rows[mine], column.values[mine]
    index = np.clip(np.searchsorted(clock.rows, rows, side="right") - 1, 0, len(clock.rows) - 1)
    inside = (clock.rows[index] >= part[0]) & (clock.rows[index] < part[1])
    first = int(np.searchsorted(clock.rows, part[0]))
    index = np.where(inside, index, min(first, len(clock.rows) - 1))
    steps = clock.steps[index]
    if clock.counter is not None and coverage(clock.counter, rows) >= COVERED:
        steps = at(clock.counter, rows)
    kept = ~clock.dropped[index]
    return Trace(found.name, steps[kept], values[kept])
