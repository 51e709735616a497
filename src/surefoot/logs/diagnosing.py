"""One answer about a log: its tables read, its runs looked at for every sign, the gravest told first."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from surefoot.judge.cause_catalog import CAUSES
from surefoot.judge.decision_tree import Facts, walk
from surefoot.logs.answer import Answer, Named, PathLike, State
from surefoot.logs.course import Course
from surefoot.logs.judging.courses import courses
from surefoot.logs.judging.ending import Ending, read_ending
from surefoot.logs.judging.rundiagnoses import led_by_run
from surefoot.logs.judging.secondopinion import second_opinion
from surefoot.logs.judging.signs import blowup, game, nonfinite, overfit, overflow, plateau, settings, spike, zero
from surefoot.logs.judging.signs.base import Look, Sign, number
from surefoot.logs.judging.signs.sight import SIGHT, Sight
from surefoot.logs.reading import door
from surefoot.logs.reading.arrays import table_of
from surefoot.logs.reading.progress import counted
from surefoot.logs.table import Table
from surefoot.records import Cause, Pattern

SIGNS: tuple[Callable[[Look], Sign | None], ...] = (
    nonfinite.look,
    zero.look,
    overfit.look,
    blowup.look,
    spike.look,
    plateau.look,
    settings.rate_is_zero,
    overflow.look,
    game.look,
    settings.clip_pins_the_norm,
    settings.resume_jumps,
)
"""In the order in which they are told, among those as grave as each other."""
FEWEST = 4
"""Losses below which a run is not called healthy."""
MOST_CAUSES = 4
_GRAVITY = {State.FAILED: 0, State.WARNING: 1, State.UNKNOWN: 2, State.HEALTHY: 3}


_AT_THE_LIMITS = np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore")
"""Logs hold numbers at the limits of float64; sums of them turn infinite, which every rule takes as it is."""


@_AT_THE_LIMITS
def diagnose(source: PathLike | Table | Course | Any, *, columns: Mapping[str, str] | None = None) -> Answer:
    """What went wrong in a training run, when it began, and what to do.

    `source` is a log of any trainer (a file, a folder, `-` for a pipe), a checkpoint, or the numbers themselves: a
    sequence of losses, or a mapping of names to sequences. `columns` names columns by role where they are not found
    by meaning: step, loss, eval_loss, norm, rate, scale. Raises `Unreadable`, a ValueError, for what cannot be read.

    >>> diagnose([2.1, 2.0, 1.9, 8734.5, float("nan")]).pattern
    <Pattern.JUMP: 'jump'>
    """
    if isinstance(source, Course):
        return _judged(source, Table(format="course", path="", records=len(source.loss), columns={}))
    if isinstance(source, Table):
        return diagnose_table(source, columns)
    if not isinstance(source, str | os.PathLike):
        return diagnose_table(table_of(source), columns)
    if door.is_checkpoint(source):
        from surefoot.logs.checkpoint import diagnose_checkpoint  # reads tensors: nothing a log needs

        return diagnose_checkpoint(source, counted(os.fspath(source)))
    return diagnose_tables(door.read(source), columns)


@_AT_THE_LIMITS
def diagnose_tables(tables: Sequence[Table], columns: Mapping[str, str] | None = None, sight: Sight = SIGHT) -> Answer:
    """The answer about the table that says most; the others are named."""
    answers = [diagnose_table(table, columns, sight) for table in tables]
    first = max(answers, key=lambda answer: len(answer.course.loss) if answer.course else 0)
    others = [f"{other.source['path']}: {other.verdict}" for other in answers if other is not first]
    if not others:
        return first
    more = f" and {len(others) - 5} more" if len(others) > 5 else ""
    return replace(first, notes=(*first.notes, f"also there: {'; '.join(others[:5])}{more}"))


@_AT_THE_LIMITS
def diagnose_table(table: Table, columns: Mapping[str, str] | None = None, sight: Sight = SIGHT) -> Answer:
    """The answer about one table: about the last of its runs that is long enough."""
    runs = courses(table, columns)
    if not runs:
        return _without_loss(table)
    enough = [index for index, run in enumerate(runs) if len(run.loss) >= 2 * FEWEST]
    chosen = enough[-1] if enough else max(range(len(runs)), key=lambda index: len(runs[index].loss))
    answer = _judged(runs[chosen], table, sight)
    if len(runs) == 1:
        return answer
    told = [f"the log holds {len(runs)} runs; this is the answer about number {chosen + 1}"]
    for index in enough:
        other = _judged(runs[index], table, sight) if index != chosen else None
        if other is not None and other.verdict is State.FAILED:
            told.append(f"run {index + 1} of them: {other.sentence}")
    return replace(answer, notes=(*told[:6], *answer.notes))


def _source(table: Table, course: Course | None) -> dict[str, Any]:
    return {
        "path": table.path,
        "format": table.format,
        "points": len(course.loss) if course else 0,
        "columns": course.used() if course else {},
        "skipped": dict(table.skipped),
        "facts": dict(table.facts),
    }


def _without_loss(table: Table) -> Answer:
    ending = _ending(table)
    if ending is not None:
        return _ended(ending, Answer(verdict=State.UNKNOWN, sentence="", source=_source(table, None)), table)
    names = ", ".join(list(table.columns)[:20])
    there = f" Columns: {names}. Name the loss with --loss." if names else ""
    return Answer(
        verdict=State.UNKNOWN,
        sentence=f"No loss was found in this {table.format} log, so there is nothing to judge by.{there}",
        source=_source(table, None),
        notes=table.notes,
    )


def _judged(course: Course, table: Table, sight: Sight = SIGHT) -> Answer:
    view = Look(course, table.facts, sight)
    signs = sorted(
        (sign for sign in (look(view) for look in SIGNS) if sign is not None),
        key=lambda sign: _GRAVITY[sign.verdict],
    )
    notes = [*table.notes, *course.notes]
    troubles = _apart([sign for sign in signs if sign.verdict is not State.HEALTHY])
    notes += [sign.sentence for sign in signs if sign.verdict is State.HEALTHY]
    answer = _told(view, troubles, table)
    if troubles:
        notes += [f"also: {sign.sentence}" for sign in troubles[1:]]
    if answer.verdict is State.FAILED:
        notes.append(_path(view, answer))
    causes = answer.causes if table.diagnoses else _agreed(answer, course)
    answer = led_by_run(replace(answer, notes=tuple(notes), course=course, causes=causes), table.diagnoses)
    ending = _ending(table)
    return _ended(ending, answer, table) if ending is not None else answer


def _apart(troubles: list[Sign]) -> list[Sign]:
    """Where a run has failed, what else is worth telling: spikes, rises and flat stretches are part of the failure."""
    if not troubles or troubles[0].verdict is not State.FAILED:
        return troubles
    apart = (Pattern.OVERFIT, Pattern.OVERFLOW_SKIPS)
    return [troubles[0], *(sign for sign in troubles[1:] if sign.pattern in apart)]


def _told(view: Look, troubles: Sequence[Sign], table: Table) -> Answer:
    loss = view.course.loss
    last = _whole(float(loss.steps[-1])) if len(loss) else None
    finite = int(np.isfinite(loss.values).sum())
    source = _source(table, view.course)
    if troubles:
        first = troubles[0]
        return Answer(
            verdict=first.verdict,
            pattern=first.pattern,
            sentence=first.sentence,
            onset_step=_whole(first.onset),
            last_step=last,
            causes=_causes(troubles),
            source=source,
        )
    if finite < FEWEST:
        few = f"Not enough to tell: {finite} {'loss' if finite == 1 else 'losses'} in this log."
        return Answer(verdict=State.UNKNOWN, sentence=few, last_step=last, source=source)
    return Answer(verdict=State.HEALTHY, sentence=_healthy(view), last_step=last, source=source)


def _healthy(view: Look) -> str:
    loss = view.loss
    assert loss is not None
    first, last = number(float(loss.raw[0])), number(float(np.median(loss.raw[-max(1, len(loss) // 20) :])))
    if view.played:
        return f"Nothing stands out: every loss is finite, from {view.at(float(loss.steps[0]))} to the end."
    verb = "fell" if loss.fall > 0 else "went"
    return f"Healthy: the loss {verb} from {first} to {last}, and nothing stands out."


def _causes(signs: Sequence[Sign]) -> tuple[Named, ...]:
    """The causes the signs speak for, each once, the surest first; those of lesser signs count for less."""
    found: dict[Cause, Named] = {}
    for rank, sign in enumerate(signs):
        for cause, confidence in sign.causes:
            if cause in found:
                continue
            advice = tuple(dict.fromkeys((*sign.advice, *CAUSES[cause].remedies)))
            weight = confidence if rank == 0 else 0.5 * confidence
            found[cause] = Named(cause=cause, confidence=weight, evidence=sign.evidence, advice=advice)
    first = {cause for cause, _ in signs[0].causes}
    ordered = sorted(found.values(), key=lambda named: (named.cause not in first, -named.confidence))
    return tuple(ordered[:MOST_CAUSES])


def _agreed(answer: Answer, course: Course) -> tuple[Named, ...]:
    """The causes, with what the judge of live runs makes of the updates around the onset, where those were logged."""
    heard = second_opinion(course, answer.onset_step) if answer.trouble else []
    if not heard or answer.pattern in (Pattern.OVERFIT, Pattern.PLATEAU):
        return answer.causes
    first = heard[0]
    known = next((one for one in answer.causes if one.cause is first.cause), None)
    evidence = (first.detail, *(known.evidence if known else answer.causes[0].evidence if answer.causes else ()))
    advice = known.advice if known else CAUSES[first.cause].remedies
    sure = max(first.confidence, known.confidence if known else 0.0)
    named = Named(cause=first.cause, confidence=sure, evidence=evidence, advice=advice)
    return (named, *(one for one in answer.causes if one is not known))[:MOST_CAUSES]


def _path(view: Look, answer: Answer) -> str:
    """The way through the decision tree, for a run that failed."""
    norm = view.norm
    facts = Facts(
        step=answer.onset_step or 0,
        mixed_precision=view.float16 or str(view.facts.get("bf16", "")).lower() in ("1", "1.0", "true"),
        scaled=len(view.course.scale) > 0,
        large_gradients=norm is not None and norm.rise > np.log(5),
        good_state=bool(answer.onset_step),
        pattern=answer.pattern,
    )
    return f"asked: {walk(facts).as_text()}"


def _ending(table: Table) -> Ending | None:
    """How a text log ends, if in an exception."""
    return read_ending(table.ending) if table.ending else None


def _ended(ending: Ending, answer: Answer, table: Table) -> Answer:
    """An exception at the end of a log: what killed the run, unless its numbers had failed before."""
    named = Named(cause=ending.cause, confidence=ending.confidence, evidence=ending.evidence, advice=ending.advice)
    if answer.verdict is State.FAILED or not ending.fault or _finished(answer, table):
        return replace(answer, notes=(*answer.notes, f"the log ends so: {ending.sentence}"))
    others = tuple(one for one in answer.causes if one.cause is not ending.cause)
    before = (f"before that: {answer.sentence}",) if answer.sentence else ()
    return replace(
        answer,
        verdict=State.FAILED,
        sentence=ending.sentence,
        onset_step=answer.last_step,
        causes=(named, *others)[:MOST_CAUSES],
        notes=(*answer.notes, *before),
    )


def _finished(answer: Answer, table: Table) -> bool:
    """Whether all the steps that were planned had been done: what failed then was not the training."""
    planned = table.facts.get("max_steps")
    return isinstance(planned, float | int) and planned > 0 and (answer.last_step or 0) >= planned


def _whole(step: float | None) -> int | None:
    return None if step is None or not np.isfinite(step) else round(step)
