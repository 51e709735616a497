"""Extracts the curves of the runs in a table, finding columns by the meaning of their names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from surefoot.logs.formats.metric_names import MetricName, MetricRole, parse_metric_name, split_words
from surefoot.logs.log_diagnosis import UnreadableInput
from surefoot.logs.run_curves import RunCurves, Series, empty_series
from surefoot.logs.symptoms.step_index import MIN_COVERAGE, StepIndex, build_step_index, counter_at, coverage
from surefoot.logs.table import LogColumn, LogTable

MIN_SHARE = 0.3
"""A loss with fewer values than this share of another's is a summary of it."""
ADVERSARIAL_WORDS = frozenset(
    {"g", "d", "gen", "disc", "generator", "discriminator", "critic", "adversarial", "adv", "actor"}
)
"""Words of losses that compete with each other: their sum means nothing."""
_CURVE_FIELDS = {"loss": "loss", "eval_loss": "eval_loss", "norm": "grad_norm", "rate": "lr", "scale": "loss_scale"}
"""Column roles (keys of the JSON output) and the fields of `RunCurves` they fill."""
COLUMN_ROLES = ("step", *_CURVE_FIELDS)
"""Roles for which a column can be named."""


def extract_curves(table: LogTable, columns: Mapping[str, str] | None = None) -> list[RunCurves]:
    """The curves of each run in a table; there is more than one where counters restarted.

    `columns` names columns by role (`COLUMN_ROLES`) if they cannot be found by their names.
    """
    if strange := set(columns or ()) - set(COLUMN_ROLES):
        raise UnreadableInput(f"columns are named by role: {', '.join(COLUMN_ROLES)}, not {', '.join(sorted(strange))}")
    wanted = {role: _find_column(table, name) for role, name in (columns or {}).items()}
    known = {name: parse_metric_name(name) for name in table.columns}
    all_series = _columns_by_role(table, known, wanted)
    if not any(len(column) for column in all_series.values()):
        return []
    main = next(column for role, column in all_series.items() if len(column))
    clock = build_step_index(table, known, main.column.rows, wanted.get("step"))
    return [_run_curves(all_series, clock, part) for part in clock.runs]


def _find_column(table: LogTable, name: str) -> str:
    if name in table.columns:
        return name
    near = difflib.get_close_matches(name, list(table.columns), 1, 0.4)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    names = ", ".join(sorted(table.columns)[:40])
    raise UnreadableInput(f"{table.path} has no column {name!r}.{hint} Its columns: {names}")


@dataclass(frozen=True, slots=True)
class _NamedColumn:
    """A column, or a sum of columns, with its name."""

    name: str
    column: LogColumn

    def __len__(self) -> int:
        return len(self.column)


def _columns_by_role(
    table: LogTable, known: Mapping[str, MetricName], wanted: Mapping[str, str]
) -> dict[str, _NamedColumn]:
    """The columns to use by role, the loss first."""
    by_role: dict[str, _NamedColumn] = {}

    def of(role: str, column: _NamedColumn | None) -> None:
        if role in wanted:
            column = _NamedColumn(wanted[role], table.columns[wanted[role]])
        if column is not None and len(column):
            by_role[role] = column

    of("loss", _loss_column(table, known, held_out=False))
    of("eval_loss", _loss_column(table, known, held_out=True))
    if "loss" not in by_role and "eval_loss" in by_role:
        by_role = {"loss": by_role["eval_loss"]}
    if "loss" not in by_role:
        loss, eval_loss = _loss_substitutes(table, known)
        of("loss", loss)
        of("eval_loss", eval_loss)
    of("norm", _longest_column(table, known, MetricRole.GRAD_NORM))
    of("rate", _longest_column(table, known, MetricRole.LR))
    of("scale", _longest_column(table, known, MetricRole.LOSS_SCALE))
    for role in (
        MetricRole.SKIPPED,
        MetricRole.ACCURACY,
        MetricRole.REWARD,
        MetricRole.SPEED,
        MetricRole.SECONDS,
        MetricRole.MEMORY,
    ):
        of(str(role), _longest_column(table, known, role))
    of("eval_accuracy", _longest_column(table, known, MetricRole.ACCURACY, held_out=True))
    for name, column in _adversarial_losses(table, known).items():
        of(f"rival:{name}", _NamedColumn(name, column))
    return by_role


def _loss_column(table: LogTable, known: Mapping[str, MetricName], *, held_out: bool) -> _NamedColumn | None:
    """The total loss; if only its terms were logged, their sum."""
    losses = {name: what for name, what in known.items() if what.role is MetricRole.LOSS and what.is_eval is held_out}
    if held_out and any(not what.is_test for what in losses.values()):
        losses = {name: what for name, what in losses.items() if not what.is_test}
    whole = {name: table.columns[name] for name, what in losses.items() if not what.term}
    terms = {name: table.columns[name] for name, what in losses.items() if what.term}
    most = max((len(column) for column in (*whole.values(), *terms.values())), default=0)
    whole = {name: column for name, column in whole.items() if len(column) >= MIN_SHARE * most or len(column) > 50}
    if whole:
        name = max(whole, key=lambda name: (len(whole[name]), _plainness(name)))
        return _NamedColumn(name, whole[name])
    if not terms:
        return None
    if len(terms) == 1 or any(ADVERSARIAL_WORDS & set(split_words(name)) for name in terms):
        name = max(terms, key=lambda name: len(terms[name]))
        return _NamedColumn(name, terms[name])
    return _sum_terms(terms)


def _plainness(name: str) -> tuple[bool, int]:
    """Preference among columns of equal length: the epoch mean over a single batch, then the shortest name."""
    words = split_words(name)
    return "epoch" in words, -len(words)


def _sum_terms(terms: Mapping[str, LogColumn]) -> _NamedColumn:
    """Add up the terms of one loss that are in the same records."""
    most = max(len(column) for column in terms.values())
    together = {name: column for name, column in terms.items() if len(column) == most}
    first = next(iter(together.values()))
    together = {name: column for name, column in together.items() if np.array_equal(column.rows, first.rows)}
    with np.errstate(invalid="ignore", over="ignore"):
        total = np.sum([column.values for column in together.values()], axis=0)
    return _NamedColumn(" + ".join(together), LogColumn(first.rows, total))


def _loss_substitutes(
    table: LogTable, known: Mapping[str, MetricName]
) -> tuple[_NamedColumn | None, _NamedColumn | None]:
    """Without a logged loss: log perplexity, or an error; for training, and for evaluation beside it."""
    for role in (MetricRole.PERPLEXITY, MetricRole.ERROR):
        columns = [_longest_column(table, known, role, held_out=held_out) for held_out in (False, True)]
        if role is MetricRole.PERPLEXITY:
            columns = [_logarithm(column) if column is not None else None for column in columns]
        if any(columns):
            return (columns[0], columns[1]) if columns[0] else (columns[1], None)
    return None, None


def _logarithm(named: _NamedColumn) -> _NamedColumn:
    with np.errstate(divide="ignore", invalid="ignore"):
        return _NamedColumn(f"log of {named.name}", LogColumn(named.column.rows, np.log(named.column.values)))


def _longest_column(
    table: LogTable, known: Mapping[str, MetricName], role: MetricRole, *, held_out: bool = False
) -> _NamedColumn | None:
    names = [name for name, what in known.items() if what.role is role and what.is_eval is held_out]
    if role is MetricRole.REWARD:
        names = [name for name in names if not {"chosen", "rejected", "margins", "std"} & set(split_words(name))]
    if not names:
        return None
    name = max(names, key=lambda name: (len(table.columns[name]), -len(name)))
    return _NamedColumn(name, table.columns[name])


def _adversarial_losses(table: LogTable, known: Mapping[str, MetricName]) -> dict[str, LogColumn]:
    """Adversarial losses, if there are at least two."""
    names = [
        name
        for name, what in known.items()
        if what.role is MetricRole.LOSS
        and not what.is_eval
        and what.term.split()
        and set(what.term.split()) <= ADVERSARIAL_WORDS
    ]
    return {name: table.columns[name] for name in names} if len(names) > 1 else {}


def _run_curves(all_series: Mapping[str, _NamedColumn], clock: StepIndex, part: tuple[int, int]) -> RunCurves:
    """The curves of one run of a table."""
    by_role = {role: _series(named, clock, part) for role, named in all_series.items()}
    main = {field: by_role.pop(role, empty_series()) for role, field in _CURVE_FIELDS.items()}
    others = {role: series for role, series in by_role.items() if len(series)}
    return RunCurves(**main, others=others, unit=clock.unit, notes=clock.notes)


def _series(named: _NamedColumn, clock: StepIndex, part: tuple[int, int]) -> Series:
    column = named.column
    in_run = (column.rows >= part[0]) & (column.rows < part[1])
    rows, values = column.rows[in_run], column.values[in_run]
    index = np.clip(np.searchsorted(clock.rows, rows, side="right") - 1, 0, len(clock.rows) - 1)
    inside = (clock.rows[index] >= part[0]) & (clock.rows[index] < part[1])
    first = int(np.searchsorted(clock.rows, part[0]))
    index = np.where(inside, index, min(first, len(clock.rows) - 1))
    steps = clock.steps[index]
    if clock.counter is not None and coverage(clock.counter, rows) >= MIN_COVERAGE:
        steps = counter_at(clock.counter, rows)
    kept = ~clock.repeated[index]
    return Series(named.name, steps[kept], values[kept])
