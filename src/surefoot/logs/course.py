"""The course of a run: loss, evaluation, norm, rate and scale over steps, found in a table by their meaning."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from surefoot.logs.meaning import Meaning, Role, meaning, words_of
from surefoot.logs.table import Column, Table, Unreadable

Floats = NDArray[np.float64]

COVERED = 0.6
"""Share of the loss's records that have to hold a counter for it to count them."""
FEWER = 0.3
"""A loss with fewer values than this share of another's is a summary of it."""
LONG = 200_000
"""Values from which columns may have been thinned, each in its own places."""
NEARBY = 32
"""Records within which a counter is then still right."""
RIVALS = frozenset({"g", "d", "gen", "disc", "generator", "discriminator", "critic", "adversarial", "adv", "actor"})
"""Words of losses that play against each other: their sum means nothing."""


@dataclass(frozen=True, slots=True)
class Trace:
    """One quantity over the run."""

    name: str
    """The column it came from."""
    steps: Floats
    values: Floats

    def __len__(self) -> int:
        return len(self.values)


def nothing() -> Trace:
    return Trace("", np.empty(0), np.empty(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """What a run did, in order of the log; a trace that the log does not have is empty."""

    loss: Trace = field(default_factory=nothing)
    """Of training, or the evaluation's where no other was logged."""
    eval_loss: Trace = field(default_factory=nothing)
    norm: Trace = field(default_factory=nothing)
    rate: Trace = field(default_factory=nothing)
    scale: Trace = field(default_factory=nothing)
    """The loss scale of float16."""
    others: Mapping[str, Trace] = field(default_factory=dict)
    """By role: accuracy, eval_accuracy, reward, speed, memory, skipped; `rival:NAME` for losses of a game."""
    unit: str = "step"
    """What the steps count: step, epoch, or point (a loss) where the log counts nothing."""
    notes: tuple[str, ...] = ()

    def used(self) -> dict[str, str]:
        """Role to column, for those that were found."""
        named = {"loss": self.loss, "eval_loss": self.eval_loss, "norm": self.norm, "rate": self.rate}
        named |= {"scale": self.scale} | dict(self.others)
        return {role: trace.name for role, trace in named.items() if len(trace)}


OPTIONS = ("step", "loss", "eval_loss", "norm", "rate", "scale")
"""Roles for which a column can be named."""


def courses(table: Table, columns: Mapping[str, str] | None = None) -> list[Course]:
    """The runs that stand in a table, one after the other; more than one where counters began anew.

    `columns` names columns by role (`OPTIONS`) where they are not to be found by meaning.
    """
    wanted = {role: _named(table, name) for role, name in (columns or {}).items()}
    known = {name: meaning(name) for name in table.columns}
    traces = _traces(table, known, wanted)
    if not any(len(column) for column in traces.values()):
        return []
    main = next(column for role, column in traces.items() if len(column))
    clock = _clock(table, known, main, wanted.get("step"))
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
        of("loss", _stand_in(table, known))
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


def _stand_in(table: Table, known: Mapping[str, Meaning]) -> _Found | None:
    """Where no loss was logged: perplexity, as its logarithm, or an error."""
    for role in (Role.PERPLEXITY, Role.ERROR):
        for held_out in (False, True):
            found = _longest(table, known, role, held_out=held_out)
            if found is not None and role is Role.PERPLEXITY:
                with np.errstate(divide="ignore", invalid="ignore"):
                    return _Found(f"log of {found.name}", Column(found.column.rows, np.log(found.column.values)))
            if found is not None:
                return found
    return None


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


@dataclass(frozen=True, slots=True)
class _Clock:
    """Which step every record belongs to, and the runs that the records fall into."""

    unit: str
    rows: NDArray[np.int64]
    steps: Floats
    parts: tuple[tuple[int, int], ...]
    """Records from and before which a run goes."""
    dropped: NDArray[np.bool_]
    """Per entry of `rows`: done again after a resume from an earlier step."""
    notes: tuple[str, ...] = ()
    counter: Column | None = None
    """Where the steps were read from, if they stand in the log."""


def _clock(table: Table, known: Mapping[str, Meaning], main: _Found, wanted: str | None) -> _Clock:
    rows = main.column.rows
    counters = _counters(table, known, rows, wanted)
    for name in counters:
        role = Role.STEP if name == wanted else known[name].role
        steps = _at(table.columns[name], rows)
        if role is Role.INNER or (role is Role.STEP and _begins_anew(steps) > 1):
            made = _nested(table, known, counters, name, rows)
            if made is not None:
                return made
        if role is not Role.INNER and _counts(steps):
            clock = _split(rows, steps, "epoch" if role is Role.EPOCH else "step")
            return replace(clock, counter=table.columns[name])
    return _split_by_epoch(table, known, rows)


def _counters(table: Table, known: Mapping[str, Meaning], rows: NDArray[np.int64], wanted: str | None) -> list[str]:
    """Columns that may count these records, the best first."""
    order = {Role.STEP: 0, Role.EPOCH: 1, Role.INNER: 2}
    able = [
        name
        for name, what in known.items()
        if what.role in order and _coverage(table.columns[name], rows) >= COVERED and not (what.held_out and rows.size)
    ]
    able.sort(
        key=lambda name: (order[known[name].role], "global" not in words_of(name), len(words_of(name)), len(name))
    )
    return [wanted, *able] if wanted else able


def _coverage(column: Column, rows: NDArray[np.int64]) -> float:
    """Share of the records that hold a counter; of columns so long that each was thinned, that have one nearby."""
    if not len(rows):
        return 0.0
    if len(rows) < LONG:
        return float(np.isin(rows, column.rows).mean())
    index = np.clip(np.searchsorted(column.rows, rows, side="right") - 1, 0, None)
    return float((np.abs(rows - column.rows[index]) <= NEARBY).mean())


def _at(column: Column, rows: NDArray[np.int64]) -> Floats:
    """A counter's value at given records; between those that have it, that of the record before."""
    finite = np.isfinite(column.values)
    have, values = column.rows[finite], column.values[finite]
    if not len(have):
        return np.full(len(rows), np.nan)
    index = np.clip(np.searchsorted(have, rows, side="right") - 1, 0, None)
    return values[index]


def _counts(steps: Floats) -> bool:
    """Whether numbers go up as a counter's do: nearly always, or in long stretches."""
    if len(steps) < 2 or not np.isfinite(steps).all():
        return len(steps) == 1
    ahead = np.diff(steps)
    moved = ahead[ahead != 0]
    if not len(moved) or len(moved) < 0.5 * len(ahead):
        return False  # stands still, or one number for many records
    if np.any(steps != np.round(steps)) and np.ptp(steps) < len(steps) / 2:
        return False  # shares of an epoch
    return float((moved > 0).mean()) > 0.9


def _begins_anew(steps: Floats) -> int:
    """How often a counter goes back to where it began."""
    if len(steps) < 2:
        return 0
    low, high = np.nanmin(steps), np.nanmax(steps)
    return int(np.sum((np.diff(steps) < 0) & (steps[1:] <= low + 0.1 * (high - low))))


def _nested(
    table: Table, known: Mapping[str, Meaning], counters: Iterable[str], name: str, rows: NDArray[np.int64]
) -> _Clock | None:
    """A counter within epochs: records are numbered through; where it begins anew in no new epoch, so does the run."""
    inner = _at(table.columns[name], rows)
    outer = next((one for one in counters if known[one].role is Role.EPOCH), None)
    if outer is None and known[name].role is not Role.INNER:
        return None
    epoch = _at(table.columns[outer], rows) if outer else np.zeros(len(rows))
    back = np.diff(inner) < 0
    ahead = np.diff(epoch) > 0
    fresh = (np.diff(epoch) < 0) | (back & ~ahead & (outer is not None))
    if not np.any(back):
        return None
    steps = np.arange(1, len(rows) + 1, dtype=np.float64)
    starts = [0, *(np.flatnonzero(fresh) + 1).tolist()]
    return _parted(rows, steps, starts, "point")


def _split_by_epoch(table: Table, known: Mapping[str, Meaning], rows: NDArray[np.int64]) -> _Clock:
    """No counter that moves with every record: they are numbered; an epoch that goes back begins a new run."""
    steps = np.arange(1, len(rows) + 1, dtype=np.float64)
    starts = [0]
    names = [name for name, what in known.items() if what.role is Role.EPOCH and not what.held_out]
    for name in names:
        if _coverage(table.columns[name], rows) >= COVERED:
            epoch = _at(table.columns[name], rows)
            starts += (np.flatnonzero((np.diff(epoch) < 0) & (epoch[1:] <= epoch[0])) + 1).tolist()
            break
    return _parted(rows, steps, starts, "point")


def _split(rows: NDArray[np.int64], steps: Floats, unit: str) -> _Clock:
    """Steps that go back: to the start of the run, then it is another one; else it was resumed from there."""
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
            again = steps[begin:index] > steps[index]
            dropped[begin:index] |= again
            notes.append(
                f"the log goes back from {unit} {steps[index - 1]:g} to {steps[index]:g}: what it did twice is told"
                " from the second time"
            )
    clock = _parted(rows, steps, starts, unit)
    kept = tuple(notes[:3]) + ((f"and {len(notes) - 3} times more",) if len(notes) > 3 else ())
    return replace(clock, dropped=dropped, notes=kept)


def _parted(rows: NDArray[np.int64], steps: Floats, starts: list[int], unit: str) -> _Clock:
    limits = [0, *(int(rows[start]) for start in starts[1:]), int(np.iinfo(np.int64).max)]
    parts = tuple(itertools.pairwise(limits))
    return _Clock(unit, rows, steps, parts, np.zeros(len(rows), dtype=bool))


def _cut(traces: Mapping[str, _Found], clock: _Clock, part: tuple[int, int]) -> Course:
    """One run out of a table."""
    made = {role: _trace(found, clock, part) for role, found in traces.items()}
    main = {role: made.pop(role, nothing()) for role in ("loss", "eval_loss", "norm", "rate", "scale")}
    others = {role: trace for role, trace in made.items() if len(trace)}
    return Course(**main, others=others, unit=clock.unit, notes=clock.notes)


def _trace(found: _Found, clock: _Clock, part: tuple[int, int]) -> Trace:
    column = found.column
    mine = (column.rows >= part[0]) & (column.rows < part[1])
    rows, values = column.rows[mine], column.values[mine]
    index = np.clip(np.searchsorted(clock.rows, rows, side="right") - 1, 0, len(clock.rows) - 1)
    inside = (clock.rows[index] >= part[0]) & (clock.rows[index] < part[1])
    first = int(np.searchsorted(clock.rows, part[0]))
    index = np.where(inside, index, min(first, len(clock.rows) - 1))
    steps = clock.steps[index]
    if clock.counter is not None and _coverage(clock.counter, rows) >= COVERED:
        steps = _at(clock.counter, rows)
    kept = ~clock.dropped[index]
    return Trace(found.name, steps[kept], values[kept])
