"""Diagnoses a log: reads its tables, checks its runs for every symptom, and reports the most severe first."""

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
from surefoot.logs.symptoms.live_judge import replay_live_judge
from surefoot.logs.symptoms.no_learning import find_plateau, find_zero_loss
from surefoot.logs.symptoms.nonfinite import find_nonfinite
from surefoot.logs.symptoms.overfit import find_overfit
from surefoot.logs.symptoms.run_answer import with_story
from surefoot.logs.symptoms.spikes import find_spike
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
"""In the order they are reported among equally severe ones."""
MIN_LOSSES = 4
"""With fewer losses a run is not called healthy."""
MAX_CAUSES = 4
_SEVERITY_ORDER = {RunHealth.FAILED: 0, RunHealth.WARNING: 1, RunHealth.UNKNOWN: 2, RunHealth.HEALTHY: 3}


_IGNORE_FLOAT_ERRORS = np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore")
"""Logs contain numbers at the limits of float64; infinite sums are fine, every rule handles them."""


@_IGNORE_FLOAT_ERRORS
def diagnose(
    source: PathLike | LogTable | RunCurves | Any, *, columns: Mapping[str, str] | None = None
) -> LogDiagnosis:
    """Diagnose a training run: what went wrong, when it began, and what to do.

    `source` is a log of any trainer (a file, a folder, `-` for a pipe), a checkpoint, or numbers: a sequence of losses,
    or a mapping of names to sequences. `columns` names columns by role if they cannot be found by their names: step,
    loss, eval_loss, norm, rate, scale. Raises `UnreadableInput`, a ValueError, for what cannot be read.

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
        from surefoot.inspect import diagnose_checkpoint  # logs do not need it

        return diagnose_checkpoint(source, progress_counter(os.fspath(source)))
    return diagnose_tables(detect.read_log(source), columns)


@_IGNORE_FLOAT_ERRORS
def diagnose_tables(
    tables: Sequence[LogTable],
    columns: Mapping[str, str] | None = None,
    thresholds: SymptomThresholds = DEFAULT_THRESHOLDS,
) -> LogDiagnosis:
    """Diagnose the table with the most losses; a note lists the others."""
    diagnoses = [diagnose_table(table, columns, thresholds) for table in tables]
    first = max(diagnoses, key=lambda diagnosis: len(diagnosis.curves.loss) if diagnosis.curves else 0)
    others = [f"{other.source['path']}: {other.verdict}" for other in diagnoses if other is not first]
    if not others:
        return first
    more = f" and {len(others) - 5} more" if len(others) > 5 else ""
    return replace(first, notes=(*first.notes, f"other logs: {'; '.join(others[:5])}{more}"))


@_IGNORE_FLOAT_ERRORS
def diagnose_table(
    table: LogTable, columns: Mapping[str, str] | None = None, thresholds: SymptomThresholds = DEFAULT_THRESHOLDS
) -> LogDiagnosis:
    """Diagnose the last run of a table that is long enough."""
    runs = extract_curves(table, columns)
    if not runs:
        return _diagnose_without_loss(table)
    enough = [index for index, run in enumerate(runs) if len(run.loss) >= 2 * MIN_LOSSES]
    chosen = enough[-1] if enough else max(range(len(runs)), key=lambda index: len(runs[index].loss))
    diagnosis = _diagnose_curves(runs[chosen], table, thresholds)
    if len(runs) == 1:
        return diagnosis
    run_notes = [f"the log contains {len(runs)} runs; this is the diagnosis of run {chosen + 1}"]
    for index in enough:
        other = _diagnose_curves(runs[index], table, thresholds) if index != chosen else None
        if other is not None and other.verdict is RunHealth.FAILED:
            run_notes.append(f"run {index + 1}: {other.sentence}")
    return replace(diagnosis, notes=(*run_notes[:6], *diagnosis.notes))


def _source_info(table: LogTable, curves: RunCurves | None) -> dict[str, Any]:
    return {
        "path": table.path,
        "format": table.format,
        "points": len(curves.loss) if curves else 0,
        "columns": curves.columns_used() if curves else {},
        "skipped": dict(table.skipped),
        "facts": dict(table.settings),
    }


def _diagnose_without_loss(table: LogTable) -> LogDiagnosis:
    crash = _find_crash(table)
    if crash is not None:
        return _with_crash(
            crash, LogDiagnosis(verdict=RunHealth.UNKNOWN, sentence="", source=_source_info(table, None)), table
        )
    names = ", ".join(list(table.columns)[:20])
    columns = f" Columns: {names}. Name the loss column with --loss." if names else ""
    return LogDiagnosis(
        verdict=RunHealth.UNKNOWN,
        sentence=f"No loss was found in this {table.format} log, so there is nothing to diagnose.{columns}",
        source=_source_info(table, None),
        notes=table.notes,
    )


def _diagnose_curves(
    curves: RunCurves, table: LogTable, thresholds: SymptomThresholds = DEFAULT_THRESHOLDS
) -> LogDiagnosis:
    view = RunView(curves, table.settings, thresholds)
    symptoms = sorted(
        (symptom for symptom in (look(view) for look in SYMPTOM_CHECKS) if symptom is not None),
        key=lambda symptom: _SEVERITY_ORDER[symptom.verdict],
    )
    notes = [*table.notes, *curves.notes]
    troubles = _drop_consequences([symptom for symptom in symptoms if symptom.verdict is not RunHealth.HEALTHY])
    notes += [symptom.sentence for symptom in symptoms if symptom.verdict is RunHealth.HEALTHY]
    diagnosis = _build_diagnosis(view, troubles, table)
    if troubles:
        notes += [f"also: {symptom.sentence}" for symptom in troubles[1:]]
    if diagnosis.verdict is RunHealth.FAILED:
        notes.append(_decision_path(view, diagnosis))
    story = table.story
    has_causes = story is not None and any(incident.causes for incident in story.incidents)
    causes = diagnosis.causes if has_causes else _with_live_judge(diagnosis, curves)
    diagnosis = replace(diagnosis, notes=tuple(notes), curves=curves, causes=causes)
    if story is not None:
        diagnosis = with_story(diagnosis, story)
    crash = _find_crash(table)
    return _with_crash(crash, diagnosis, table) if crash is not None else diagnosis


def _drop_consequences(troubles: list[Symptom]) -> list[Symptom]:
    """For a failed run, drop symptoms that are part of the failure: spikes, rises and flat stretches."""
    if not troubles or troubles[0].verdict is not RunHealth.FAILED:
        return troubles
    independent = (Pattern.OVERFIT, Pattern.OVERFLOW_SKIPS)
    kept = [troubles[0], *(symptom for symptom in troubles[1:] if symptom.pattern in independent)]
    earlier = next((symptom for symptom in kept[1:] if _came_long_before(symptom, troubles[0])), None)
    if earlier is None:
        return kept
    # What was worth keeping was made before the first trouble, so that one leads; the verdict is that of the worst.
    return [replace(earlier, verdict=RunHealth.FAILED), *(symptom for symptom in kept if symptom is not earlier)]


def _came_long_before(symptom: Symptom, failure: Symptom) -> bool:
    """Whether a run overfitted for most of its time before it diverged."""
    diverged = failure.pattern in (Pattern.JUMP, Pattern.EXPONENTIAL, Pattern.OSCILLATING)
    if symptom.pattern is not Pattern.OVERFIT or not diverged or symptom.onset is None or failure.onset is None:
        return False
    return 2 * symptom.onset < failure.onset


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
        few = f"Too few losses to diagnose: {finite} {'loss' if finite == 1 else 'losses'} in this log."
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


def _rank_causes(symptoms: Sequence[Symptom]) -> tuple[RankedCause, ...]:
    """The causes of the symptoms, each once, the most confident first; those of lesser symptoms count half."""
    causes: dict[Cause, RankedCause] = {}
    for rank, symptom in enumerate(symptoms):
        for cause, confidence in symptom.causes:
            if cause in causes:
                continue
            advice = tuple(dict.fromkeys((*symptom.advice, *CAUSES[cause].remedies)))
            weight = confidence if rank == 0 else 0.5 * confidence
            causes[cause] = RankedCause(cause=cause, confidence=weight, evidence=symptom.evidence, advice=advice)
    first = {cause for cause, _ in symptoms[0].causes}
    ordered = sorted(causes.values(), key=lambda ranked: (ranked.cause not in first, -ranked.confidence))
    return tuple(ordered[:MAX_CAUSES])


def _with_live_judge(diagnosis: LogDiagnosis, curves: RunCurves) -> tuple[RankedCause, ...]:
    """The causes, with the live judge's diagnosis of the updates around the onset, if those were logged."""
    judged = replay_live_judge(curves, diagnosis.onset_step) if diagnosis.is_trouble else []
    if not judged or diagnosis.pattern in (Pattern.OVERFIT, Pattern.PLATEAU):
        return diagnosis.causes
    first = judged[0]
    known_cause = next((cause for cause in diagnosis.causes if cause.cause is first.cause), None)
    evidence = (
        first.detail,
        *(known_cause.evidence if known_cause else diagnosis.causes[0].evidence if diagnosis.causes else ()),
    )
    advice = known_cause.advice if known_cause else CAUSES[first.cause].remedies
    sure = max(first.confidence, known_cause.confidence if known_cause else 0.0)
    ranked = RankedCause(cause=first.cause, confidence=sure, evidence=evidence, advice=advice)
    return (ranked, *(cause for cause in diagnosis.causes if cause is not known_cause))[:MAX_CAUSES]


def _decision_path(view: RunView, diagnosis: LogDiagnosis) -> str:
    """The path through the decision tree, for a failed run."""
    norm = view.grad_norm
    facts = Facts(
        step=diagnosis.onset_step or 0,
        mixed_precision=view.float16 or str(view.settings.get("bf16", "")).lower() in ("1", "1.0", "true"),
        scaled=len(view.curves.loss_scale) > 0,
        large_gradients=norm is not None and norm.rise > np.log(5),
        good_state=bool(diagnosis.onset_step),
        pattern=diagnosis.pattern,
    )
    return f"decision path: {walk(facts).as_text()}"


def _find_crash(table: LogTable) -> Crash | None:
    """How a text log ends, if in an exception."""
    return find_crash(table.tail) if table.tail else None


def _with_crash(crash: Crash, diagnosis: LogDiagnosis, table: LogTable) -> LogDiagnosis:
    """An exception at the end of a log is the cause, unless the numbers had failed before."""
    ranked = RankedCause(cause=crash.cause, confidence=crash.confidence, evidence=crash.evidence, advice=crash.advice)
    if diagnosis.verdict is RunHealth.FAILED or not crash.is_fault or _all_steps_done(diagnosis, table):
        return replace(diagnosis, notes=(*diagnosis.notes, f"the log ends with: {crash.sentence}"))
    others = tuple(cause for cause in diagnosis.causes if cause.cause is not crash.cause)
    before = (f"before that: {diagnosis.sentence}",) if diagnosis.sentence else ()
    return replace(
        diagnosis,
        verdict=RunHealth.FAILED,
        sentence=crash.sentence,
        onset_step=diagnosis.last_step,
        causes=(ranked, *others)[:MAX_CAUSES],
        notes=(*diagnosis.notes, *before),
    )


def _all_steps_done(diagnosis: LogDiagnosis, table: LogTable) -> bool:
    """Whether all planned steps were done, so that what failed was not the training."""
    planned = table.settings.get("max_steps")
    return isinstance(planned, float | int) and planned > 0 and (diagnosis.last_step or 0) >= planned


def _rounded(step: float | None) -> int | None:
    return None if step is None or not np.isfinite(step) else round(step)
