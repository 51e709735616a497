"""One answer about a log: its tables read, its runs looked at for every sign, the gravest told first."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from surefoot.judge.cause_catalog import CAUSES
from surefoot.judge.decision_tree import Facts, walk
from surefoot.logs.formats import detect
from surefoot.logs.formats.arrays import table_from_arrays
from surefoot.logs.formats.log_source import progress_counter
from surefoot.logs.log_diagnosis import LogDiagnosis, PathLike, RankedCause, RunHealth
from surefoot.logs.run_curves import RunCurves
from surefoot.logs.symptoms.crash import Crash, find_crash
from surefoot.logs.symptoms.divergence import find_divergence
from surefoot.logs.symptoms.extract_curves import extract_curves
from surefoot.logs.symptoms.gan import find_gan_imbalance
from surefoot.logs.symptoms.jumps import find_spike
from surefoot.logs.symptoms.live_judge import replay_live_judge, with_recorded_diagnoses
from surefoot.logs.symptoms.no_learning import find_plateau, find_zero_loss
from surefoot.logs.symptoms.nonfinite import find_nonfinite
from surefoot.logs.symptoms.overfit import find_overfit
from surefoot.logs.symptoms.symptom import DEFAULT_THRESHOLDS, RunView, Symptom, SymptomThresholds, format_number
from surefoot.logs.symptoms.training_settings import (
    find_constant_clipping,
    find_overflow_skips,
    find_resume_jump,
    find_zero_lr,
)
from surefoot.logs.table import LogTable
from surefoot.records import Cause, Pattern

SYMPTOM_CHECKS: tuple[Callable[[RunView], Symptom | None], ...] = (
    find_nonfinite,
    find_zero_loss,
    find_overfit,
    find_divergence,
    find_spike,
    find_plateau,
    find_zero_lr,
    find_overflow_skips,
    find_gan_imbalance,
    find_constant_clipping,
    find_resume_jump,
)
"""In the order in which they are told, among those as grave as each other."""
MIN_LOSSES = 4
"""Losses below which a run is not called healthy."""
MAX_CAUSES = 4
_SEVERITY_ORDER = {RunHealth.FAILED: 0, RunHealth.WARNING: 1, RunHealth.UNKNOWN: 2, RunHealth.HEALTHY: 3}


_IGNORE_FLOAT_ERRORS = np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore")
"""Logs hold numbers at the limits of float64; sums of them turn infinite, which every rule takes as it is."""


@_IGNORE_FLOAT_ERRORS
def diagnose(
    source: PathLike | LogTable | RunCurves | Any, *, columns: Mapping[str, str] | None = None
) -> LogDiagnosis:
    """What went wrong in a training run, when it began, and what to do.

    `source` is a log of any trainer (a file, a folder, `-` for a pipe), a checkpoint, or the numbers themselves: a
    sequence of losses, or a mapping of names to sequences. `columns` names columns by role where they are not found
    by meaning: step, loss, eval_loss, norm, rate, scale. Raises `Unreadable`, a ValueError, for what cannot be read.

    >>> diagnose([2.1, 2.0, 1.9, 8734.5, float("nan")]).pattern
    <Pattern.JUMP: 'jump'>
    """
    if isinstance(source, RunCurves):
        return _diagnose_curves(source, LogTable(format="course", path="", records=len(source.loss), columns={}))
    if isinstance(source, LogTable):
        return diagnose_table(source, columns)
    if not isinstance(source, str | os.PathLike):
        return diagnose_table(table_from_arrays(source), columns)
    if detect.is_checkpoint(source):
        from surefoot.inspect import diagnose_checkpoint  # reads tensors: nothing a log needs

        return diagnose_checkpoint(source, progress_counter(os.fspath(source)))
    return diagnose_tables(detect.read_log(source), columns)


@_IGNORE_FLOAT_ERRORS
def diagnose_tables(
    tables: Sequence[LogTable], columns: Mapping[str, str] | None = None, sight: SymptomThresholds = DEFAULT_THRESHOLDS
) -> LogDiagnosis:
    """The answer about the table that says most; the others are named."""
    answers = [diagnose_table(table, columns, sight) for table in tables]
    first = max(answers, key=lambda answer: len(answer.curves.loss) if answer.curves else 0)
    others = [f"{other.source['path']}: {other.verdict}" for other in answers if other is not first]
    if not others:
        return first
    more = f" and {len(others) - 5} more" if len(others) > 5 else ""
    return replace(first, notes=(*first.notes, f"also there: {'; '.join(others[:5])}{more}"))


@_IGNORE_FLOAT_ERRORS
def diagnose_table(
    table: LogTable, columns: Mapping[str, str] | None = None, sight: SymptomThresholds = DEFAULT_THRESHOLDS
) -> LogDiagnosis:
    """The answer about one table: about the last of its runs that is long enough."""
    runs = extract_curves(table, columns)
    if not runs:
        return _diagnose_without_loss(table)
    enough = [index for index, run in enumerate(runs) if len(run.loss) >= 2 * MIN_LOSSES]
    chosen = enough[-1] if enough else max(range(len(runs)), key=lambda index: len(runs[index].loss))
    answer = _diagnose_curves(runs[chosen], table, sight)
    if len(runs) == 1:
        return answer
    told = [f"the log holds {len(runs)} runs; this is the answer about number {chosen + 1}"]
    for index in enough:
        other = _diagnose_curves(runs[index], table, sight) if index != chosen else None
        if other is not None and other.verdict is RunHealth.FAILED:
            told.append(f"run {index + 1} of them: {other.sentence}")
    return replace(answer, notes=(*told[:6], *answer.notes))


def _source_info(table: LogTable, course: RunCurves | None) -> dict[str, Any]:
    return {
        "path": table.path,
        "format": table.format,
        "points": len(course.loss) if course else 0,
        "columns": course.columns_used() if course else {},
        "skipped": dict(table.skipped),
        "facts": dict(table.settings),
    }


def _diagnose_without_loss(table: LogTable) -> LogDiagnosis:
    ending = _find_crash(table)
    if ending is not None:
        return _with_crash(
            ending, LogDiagnosis(verdict=RunHealth.UNKNOWN, sentence="", source=_source_info(table, None)), table
        )
    names = ", ".join(list(table.columns)[:20])
    there = f" Columns: {names}. Name the loss with --loss." if names else ""
    return LogDiagnosis(
        verdict=RunHealth.UNKNOWN,
        sentence=f"No loss was found in this {table.format} log, so there is nothing to judge by.{there}",
        source=_source_info(table, None),
        notes=table.notes,
    )


def _diagnose_curves(course: RunCurves, table: LogTable, sight: SymptomThresholds = DEFAULT_THRESHOLDS) -> LogDiagnosis:
    view = RunView(course, table.settings, sight)
    signs = sorted(
        (sign for sign in (look(view) for look in SYMPTOM_CHECKS) if sign is not None),
        key=lambda sign: _SEVERITY_ORDER[sign.verdict],
    )
    notes = [*table.notes, *course.notes]
    troubles = _drop_consequences([sign for sign in signs if sign.verdict is not RunHealth.HEALTHY])
    notes += [sign.sentence for sign in signs if sign.verdict is RunHealth.HEALTHY]
    answer = _build_diagnosis(view, troubles, table)
    if troubles:
        notes += [f"also: {sign.sentence}" for sign in troubles[1:]]
    if answer.verdict is RunHealth.FAILED:
        notes.append(_decision_path(view, answer))
    causes = answer.causes if table.diagnoses else _with_live_judge(answer, course)
    answer = with_recorded_diagnoses(replace(answer, notes=tuple(notes), curves=course, causes=causes), table.diagnoses)
    ending = _find_crash(table)
    return _with_crash(ending, answer, table) if ending is not None else answer


def _drop_consequences(troubles: list[Symptom]) -> list[Symptom]:
    """Where a run has failed, what else is worth telling: spikes, rises and flat stretches are part of the failure."""
    if not troubles or troubles[0].verdict is not RunHealth.FAILED:
        return troubles
    apart = (Pattern.OVERFIT, Pattern.OVERFLOW_SKIPS)
    return [troubles[0], *(sign for sign in troubles[1:] if sign.pattern in apart)]


def _build_diagnosis(view: RunView, troubles: Sequence[Symptom], table: LogTable) -> LogDiagnosis:
    loss = view.curves.loss
    last = _rounded(float(loss.steps[-1])) if len(loss) else None
    finite = int(np.isfinite(loss.values).sum())
    source = _source_info(table, view.curves)
    if troubles:
        first = troubles[0]
        return LogDiagnosis(
            verdict=first.verdict,
            pattern=first.pattern,
            sentence=first.sentence,
            onset_step=_rounded(first.onset),
            last_step=last,
            causes=_rank_causes(troubles),
            source=source,
        )
    if finite < MIN_LOSSES:
        few = f"Not enough to tell: {finite} {'loss' if finite == 1 else 'losses'} in this log."
        return LogDiagnosis(verdict=RunHealth.UNKNOWN, sentence=few, last_step=last, source=source)
    return LogDiagnosis(verdict=RunHealth.HEALTHY, sentence=_healthy_sentence(view), last_step=last, source=source)


def _healthy_sentence(view: RunView) -> str:
    loss = view.loss
    assert loss is not None
    first, last = (
        format_number(float(loss.raw[0])),
        format_number(float(np.median(loss.raw[-max(1, len(loss) // 20) :]))),
    )
    if view.adversarial:
        return f"Nothing stands out: every loss is finite, from {view.at_step(float(loss.steps[0]))} to the end."
    verb = "fell" if loss.fall > 0 else "went"
    return f"Healthy: the loss {verb} from {first} to {last}, and nothing stands out."


def _rank_causes(signs: Sequence[Symptom]) -> tuple[RankedCause, ...]:
    """The causes the signs speak for, each once, the surest first; those of lesser signs count for less."""
    found: dict[Cause, RankedCause] = {}
    for rank, sign in enumerate(signs):
        for cause, confidence in sign.causes:
            if cause in found:
                continue
            advice = tuple(dict.fromkeys((*sign.advice, *CAUSES[cause].remedies)))
            weight = confidence if rank == 0 else 0.5 * confidence
            found[cause] = RankedCause(cause=cause, confidence=weight, evidence=sign.evidence, advice=advice)
    first = {cause for cause, _ in signs[0].causes}
    ordered = sorted(found.values(), key=lambda named: (named.cause not in first, -named.confidence))
    return tuple(ordered[:MAX_CAUSES])


def _with_live_judge(answer: LogDiagnosis, course: RunCurves) -> tuple[RankedCause, ...]:
    """The causes, with what the judge of live runs makes of the updates around the onset, where those were logged."""
    heard = replay_live_judge(course, answer.onset_step) if answer.is_trouble else []
    if not heard or answer.pattern in (Pattern.OVERFIT, Pattern.PLATEAU):
        return answer.causes
    first = heard[0]
    known = next((one for one in answer.causes if one.cause is first.cause), None)
    evidence = (first.detail, *(known.evidence if known else answer.causes[0].evidence if answer.causes else ()))
    advice = known.advice if known else CAUSES[first.cause].remedies
    sure = max(first.confidence, known.confidence if known else 0.0)
    named = RankedCause(cause=first.cause, confidence=sure, evidence=evidence, advice=advice)
    return (named, *(one for one in answer.causes if one is not known))[:MAX_CAUSES]


def _decision_path(view: RunView, answer: LogDiagnosis) -> str:
    """The way through the decision tree, for a run that failed."""
    norm = view.grad_norm
    facts = Facts(
        step=answer.onset_step or 0,
        mixed_precision=view.float16 or str(view.settings.get("bf16", "")).lower() in ("1", "1.0", "true"),
        scaled=len(view.curves.loss_scale) > 0,
        large_gradients=norm is not None and norm.rise > np.log(5),
        good_state=bool(answer.onset_step),
        pattern=answer.pattern,
    )
    return f"asked: {walk(facts).as_text()}"


def _find_crash(table: LogTable) -> Crash | None:
    """How a text log ends, if in an exception."""
    return find_crash(table.tail) if table.tail else None


def _with_crash(ending: Crash, answer: LogDiagnosis, table: LogTable) -> LogDiagnosis:
    """An exception at the end of a log: what killed the run, unless its numbers had failed before."""
    named = RankedCause(
        cause=ending.cause, confidence=ending.confidence, evidence=ending.evidence, advice=ending.advice
    )
    if answer.verdict is RunHealth.FAILED or not ending.is_fault or _all_steps_done(answer, table):
        return replace(answer, notes=(*answer.notes, f"the log ends so: {ending.sentence}"))
    others = tuple(one for one in answer.causes if one.cause is not ending.cause)
    before = (f"before that: {answer.sentence}",) if answer.sentence else ()
    return replace(
        answer,
        verdict=RunHealth.FAILED,
        sentence=ending.sentence,
        onset_step=answer.last_step,
        causes=(named, *others)[:MAX_CAUSES],
        notes=(*answer.notes, *before),
    )


def _all_steps_done(answer: LogDiagnosis, table: LogTable) -> bool:
    """Whether all the steps that were planned had been done: what failed then was not the training."""
    planned = table.settings.get("max_steps")
    return isinstance(planned, float | int) and planned > 0 and (answer.last_step or 0) >= planned


def _rounded(step: float | None) -> int | None:
    return None if step is None or not np.isfinite(step) else round(step)
