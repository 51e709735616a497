"""What surefoot's live judge says about a log: recorded during the run, or replayed over a log of every update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from surefoot.judge.cause_catalog import CAUSES
from surefoot.judge.judge import Judge
from surefoot.judge.policy import Policy
from surefoot.logs.log_diagnosis import LogDiagnosis, RankedCause, RunHealth
from surefoot.logs.run_curves import Floats, RunCurves, Series
from surefoot.logs.table import RunDiagnosis
from surefoot.records import NAN, Action, Cause, Diagnosis, Pattern, StepMetrics, Verdict

SUDDEN_PATTERNS = frozenset({Pattern.NONFINITE, Pattern.JUMP, Pattern.EXPONENTIAL, Pattern.OSCILLATING})
SUDDEN_PATTERNS |= frozenset({Pattern.COLLAPSE_TO_ZERO, Pattern.RECOVERED_SPIKE})
"""Patterns with an onset; for others only a diagnosis that led to a decision can be the cause."""
MAX_STEPS_EARLIER = 20
"""Steps by which a diagnosis may precede the onset found in the log, as a rewind shifts steps."""
MAX_CAUSES = 4


def with_recorded_diagnoses(diagnosis: LogDiagnosis, diagnoses: Sequence[RunDiagnosis]) -> LogDiagnosis:
    """Put the causes diagnosed during the run first; a healthy run in which surefoot intervened becomes a warning."""
    known = [recorded for recorded in diagnoses if recorded.cause is not Cause.UNKNOWN]
    if diagnosis.verdict is RunHealth.HEALTHY and known:
        applied = [recorded for recorded in known if recorded.applied]
        return _intervened(diagnosis, applied) if applied else _note_passed_diagnosis(diagnosis, known)
    if not diagnosis.is_trouble:
        return diagnosis
    chosen = [recorded for recorded in known if recorded.decided or diagnosis.pattern in SUDDEN_PATTERNS]
    chosen = _diagnoses_at_onset(chosen, diagnosis.onset_step)
    return replace(diagnosis, causes=_merge_causes(chosen, diagnosis.causes)) if chosen else diagnosis


def _diagnoses_at_onset(diagnoses: Sequence[RunDiagnosis], onset: int | None) -> list[RunDiagnosis]:
    """The diagnoses made together: where the run was stopped, else nearest to the onset."""
    stopped = [recorded.attempt for recorded in diagnoses if recorded.applied is Action.STOP]
    after = [recorded for recorded in diagnoses if onset is None or recorded.step >= onset - MAX_STEPS_EARLIER]
    if not stopped and not after:
        return []
    attempt = stopped[-1] if stopped else min(after, key=lambda recorded: abs(recorded.step - (onset or 0))).attempt
    return [recorded for recorded in diagnoses if recorded.attempt == attempt]


def _note_passed_diagnosis(diagnosis: LogDiagnosis, diagnoses: Sequence[RunDiagnosis]) -> LogDiagnosis:
    """No action was needed: the run stays healthy, and the sentence mentions the diagnosis."""
    surest = max(diagnoses, key=lambda recorded: recorded.confidence)
    words = f"; what it diagnosed on the way ({surest.cause} at step {surest.step:,}) passed."
    return replace(diagnosis, sentence=diagnosis.sentence.removesuffix(", and nothing stands out.").rstrip(".") + words)


def _intervened(diagnosis: LogDiagnosis, diagnoses: Sequence[RunDiagnosis]) -> LogDiagnosis:
    first = diagnoses[0]
    times = len({recorded.attempt for recorded in diagnoses})
    more = f", and {times - 1} more {'time' if times == 2 else 'times'} later" if times > 1 else ""
    return replace(
        diagnosis,
        verdict=RunHealth.WARNING,
        sentence=f"surefoot intervened at step {first.step:,} ({first.applied}){more}; the run went on well after it.",
        onset_step=first.step,
        causes=_merge_causes(diagnoses, diagnosis.causes),
        notes=(*diagnosis.notes, f"after that: {diagnosis.sentence}"),
    )


def _merge_causes(diagnoses: Sequence[RunDiagnosis], others: Sequence[RankedCause]) -> tuple[RankedCause, ...]:
    """The recorded causes, each once, with the log's evidence; then the log's other causes with lower confidence."""
    causes: dict[Cause, RankedCause] = {}
    for recorded in diagnoses:
        cause = recorded.cause
        same = next((other for other in others if other.cause is cause), None)
        more = same.evidence if same else others[0].evidence if others and not causes else ()
        evidence = tuple(dict.fromkeys((*recorded.evidence, *more)))
        advice = tuple(dict.fromkeys((*recorded.advice, *(same.advice if same else CAUSES[cause].remedies))))
        causes.setdefault(
            cause, RankedCause(cause=cause, confidence=recorded.confidence, evidence=evidence, advice=advice)
        )
    least = min(recorded.confidence for recorded in causes.values())
    added = [
        replace(other, confidence=min(0.5 * other.confidence, least)) for other in others if other.cause not in causes
    ]
    return (*causes.values(), *added)[:MAX_CAUSES]


UPDATES_BEFORE = 1000
"""Updates before the onset replayed as baseline."""
UPDATES_AFTER = 40
"""Updates from the onset on within which a diagnosis counts."""
MIN_UPDATES_BEFORE = 60
"""With fewer updates before the onset there is no baseline."""


def replay_live_judge(curves: RunCurves, onset: float | None) -> list[Diagnosis]:
    """Replay the updates around the onset, if all were logged; the judge's diagnoses, the most confident first."""
    loss = curves.loss
    measured = len(curves.grad_norm) >= MIN_UPDATES_BEFORE and bool(np.any(curves.grad_norm.values != 0))
    if onset is None or curves.unit != "step" or not measured or not _logs_every_update(loss.steps):
        return []
    at = int(np.searchsorted(loss.steps, onset))
    if at < MIN_UPDATES_BEFORE:
        return []
    first, last = max(0, at - UPDATES_BEFORE), min(len(loss), at + UPDATES_AFTER)
    steps = loss.steps[first:last]
    losses = loss.values[first:last]
    norms, rates, scales = (_values_at(series, steps) for series in (curves.grad_norm, curves.lr, curves.loss_scale))
    judge = Judge(Policy(observe=True))
    judged: list[Diagnosis] = []
    for number in range(len(steps)):
        row = _step_metrics(
            number, float(losses[number]), float(norms[number]), float(rates[number]), float(scales[number])
        )
        events = judge.update(row)
        if number >= at - first - 2:
            judged += [event for event in events if isinstance(event, Diagnosis) and event.cause is not Cause.UNKNOWN]
    return sorted(judged, key=lambda event: -event.confidence)


def _logs_every_update(steps: Floats) -> bool:
    return len(steps) > MIN_UPDATES_BEFORE and float(np.median(np.diff(steps))) == 1.0


def _values_at(series: Series, steps: Floats) -> Floats:
    """A series' values at the given steps; NaN where it has none within one step."""
    if not len(series):
        return np.full(len(steps), NAN)
    index = np.clip(np.searchsorted(series.steps, steps, side="right") - 1, 0, None)
    near = np.abs(steps - series.steps[index]) <= 1
    return np.where(near, series.values[index], NAN)


def _step_metrics(number: int, loss: float, norm: float, rate: float, scale: float) -> StepMetrics:
    bad = not np.isfinite(loss) or not np.isfinite(norm)
    return StepMetrics(
        step=number,
        attempt=number,
        time=float(number),
        verdict=Verdict.NONFINITE if bad else Verdict.APPLIED,
        loss=loss,
        norm=norm,
        lr=rate,
        loss_scale=scale,
    )
