"""The answer about a run of surefoot's own: what the run named while it ran comes first, what its log adds after it. // What the judge of live runs says of a log with loss and norm of every update, as it would have said it then."""

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
from surefoot.records import NAN, Cause, Diagnosis, Pattern, StepMetrics, Verdict

SUDDEN_PATTERNS = frozenset({Pattern.NONFINITE, Pattern.JUMP, Pattern.EXPONENTIAL, Pattern.OSCILLATING})
SUDDEN_PATTERNS |= frozenset({Pattern.COLLAPSE_TO_ZERO, Pattern.RECOVERED_SPIKE})
"""Patterns of what begins at some step; of the others only a diagnosis that led to a decision can be the cause."""
MAX_STEPS_EARLIER = 20
"""Steps by which a diagnosis may precede the onset that is read from the log: a rewind moves steps."""
MAX_CAUSES = 4


def with_recorded_diagnoses(answer: LogDiagnosis, diagnoses: Sequence[RunDiagnosis]) -> LogDiagnosis:
    """The same answer with the run's own causes first; a run that was put right is no longer called healthy."""
    known = [one for one in diagnoses if one.cause in set(Cause) and one.cause != Cause.UNKNOWN]
    if answer.verdict is RunHealth.HEALTHY and known:
        applied = [one for one in known if one.applied]
        return _intervened(answer, applied) if applied else _note_passed_diagnosis(answer, known)
    if not answer.is_trouble:
        return answer
    chosen = [one for one in known if one.decided or answer.pattern in SUDDEN_PATTERNS]
    chosen = _diagnoses_at_onset(chosen, answer.onset_step)
    return replace(answer, causes=_merge_causes(chosen, answer.causes)) if chosen else answer


def _diagnoses_at_onset(diagnoses: Sequence[RunDiagnosis], onset: int | None) -> list[RunDiagnosis]:
    """Those that were named together: where the run was stopped, else the first from the onset on."""
    stopped = [one.attempt for one in diagnoses if one.applied == "stop"]
    after = [one for one in diagnoses if onset is None or one.step >= onset - MAX_STEPS_EARLIER]
    if not stopped and not after:
        return []
    attempt = stopped[-1] if stopped else min(after, key=lambda one: abs(one.step - (onset or 0))).attempt
    return [one for one in diagnoses if one.attempt == attempt]


def _note_passed_diagnosis(answer: LogDiagnosis, diagnoses: Sequence[RunDiagnosis]) -> LogDiagnosis:
    """Nothing had to be done: the run stays healthy, and what it named is said."""
    surest = max(diagnoses, key=lambda one: one.confidence)
    words = f"; what it diagnosed on the way ({surest.cause} at step {surest.step:,}) passed."
    return replace(answer, sentence=answer.sentence.removesuffix(", and nothing stands out.").rstrip(".") + words)


def _intervened(answer: LogDiagnosis, diagnoses: Sequence[RunDiagnosis]) -> LogDiagnosis:
    first = diagnoses[0]
    times = len({one.attempt for one in diagnoses})
    more = f", and {times - 1} more {'time' if times == 2 else 'times'} later" if times > 1 else ""
    return replace(
        answer,
        verdict=RunHealth.WARNING,
        sentence=f"surefoot intervened at step {first.step:,} ({first.applied}){more}; the run went on well after it.",
        onset_step=first.step,
        causes=_merge_causes(diagnoses, answer.causes),
        notes=(*answer.notes, f"after that: {answer.sentence}"),
    )


def _merge_causes(diagnoses: Sequence[RunDiagnosis], others: Sequence[RankedCause]) -> tuple[RankedCause, ...]:
    """The run's causes, each once, the log's evidence with the first; then what only the log speaks for, and lower."""
    found: dict[Cause, RankedCause] = {}
    for one in diagnoses:
        cause = Cause(one.cause)
        same = next((other for other in others if other.cause is cause), None)
        more = same.evidence if same else others[0].evidence if others and not found else ()
        evidence = tuple(dict.fromkeys((*one.evidence, *more)))
        advice = tuple(dict.fromkeys((*one.advice, *(same.advice if same else CAUSES[cause].remedies))))
        found.setdefault(cause, RankedCause(cause=cause, confidence=one.confidence, evidence=evidence, advice=advice))
    least = min(one.confidence for one in found.values())
    added = [
        replace(other, confidence=min(0.5 * other.confidence, least)) for other in others if other.cause not in found
    ]
    return (*found.values(), *added)[:MAX_CAUSES]


UPDATES_BEFORE = 1000
"""Updates before the onset that the judge is shown, to know what was normal."""
UPDATES_AFTER = 40
"""Updates from the onset on within which it has to speak."""
MIN_UPDATES_BEFORE = 60
"""Updates before the onset below which it cannot know what was normal."""


def replay_live_judge(course: RunCurves, onset: float | None) -> list[Diagnosis]:
    """The causes that the judge names around the onset, the surest first; none where the log is not of its kind."""
    loss = course.loss
    measured = len(course.grad_norm) >= MIN_UPDATES_BEFORE and bool(np.any(course.grad_norm.values != 0))
    if onset is None or course.unit != "step" or not measured or not _logs_every_update(loss.steps):
        return []
    at = int(np.searchsorted(loss.steps, onset))
    if at < MIN_UPDATES_BEFORE:
        return []
    first, last = max(0, at - UPDATES_BEFORE), min(len(loss), at + UPDATES_AFTER)
    steps = loss.steps[first:last]
    losses = loss.values[first:last]
    norms, rates, scales = (_values_at(trace, steps) for trace in (course.grad_norm, course.lr, course.loss_scale))
    judge = Judge(Policy(observe=True))
    told: list[Diagnosis] = []
    for number in range(len(steps)):
        row = _step_metrics(
            number, float(losses[number]), float(norms[number]), float(rates[number]), float(scales[number])
        )
        events = judge.update(row)
        if number >= at - first - 2:
            told += [event for event in events if isinstance(event, Diagnosis) and event.cause is not Cause.UNKNOWN]
    return sorted(told, key=lambda one: -one.confidence)


def _logs_every_update(steps: Floats) -> bool:
    return len(steps) > MIN_UPDATES_BEFORE and float(np.median(np.diff(steps))) == 1.0


def _values_at(trace: Series, steps: Floats) -> Floats:
    """A trace's values at the given steps; NaN where it has none within a step."""
    if not len(trace):
        return np.full(len(steps), NAN)
    index = np.clip(np.searchsorted(trace.steps, steps, side="right") - 1, 0, None)
    near = np.abs(steps - trace.steps[index]) <= 1
    return np.where(near, trace.values[index], NAN)


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
