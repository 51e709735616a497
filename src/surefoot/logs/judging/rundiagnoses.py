"""The answer about a run of surefoot's own: what the run named while it ran comes first, what its log adds after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from surefoot.judge.cause_catalog import CAUSES
from surefoot.logs.answer import LogDiagnosis, RankedCause, RunHealth
from surefoot.logs.table import RunDiagnosis
from surefoot.records import Cause, Pattern

ACUTE = frozenset({Pattern.NONFINITE, Pattern.JUMP, Pattern.EXPONENTIAL, Pattern.OSCILLATING})
ACUTE |= frozenset({Pattern.COLLAPSE_TO_ZERO, Pattern.RECOVERED_SPIKE})
"""Patterns of what begins at some step; of the others only a diagnosis that led to a decision can be the cause."""
EARLIER = 20
"""Steps by which a diagnosis may precede the onset that is read from the log: a rewind moves steps."""
MAX_CAUSES = 4


def with_recorded_diagnoses(answer: LogDiagnosis, diagnoses: Sequence[RunDiagnosis]) -> LogDiagnosis:
    """The same answer with the run's own causes first; a run that was put right is no longer called healthy."""
    known = [one for one in diagnoses if one.cause in set(Cause) and one.cause != Cause.UNKNOWN]
    if answer.verdict is RunHealth.HEALTHY and known:
        applied = [one for one in known if one.applied]
        return _intervened(answer, applied) if applied else _passed(answer, known)
    if not answer.is_trouble:
        return answer
    chosen = [one for one in known if one.decided or answer.pattern in ACUTE]
    chosen = _of_this_trouble(chosen, answer.onset_step)
    return replace(answer, causes=_merged(chosen, answer.causes)) if chosen else answer


def _of_this_trouble(diagnoses: Sequence[RunDiagnosis], onset: int | None) -> list[RunDiagnosis]:
    """Those that were named together: where the run was stopped, else the first from the onset on."""
    stopped = [one.attempt for one in diagnoses if one.applied == "stop"]
    after = [one for one in diagnoses if onset is None or one.step >= onset - EARLIER]
    if not stopped and not after:
        return []
    attempt = stopped[-1] if stopped else min(after, key=lambda one: abs(one.step - (onset or 0))).attempt
    return [one for one in diagnoses if one.attempt == attempt]


def _passed(answer: LogDiagnosis, diagnoses: Sequence[RunDiagnosis]) -> LogDiagnosis:
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
        causes=_merged(diagnoses, answer.causes),
        notes=(*answer.notes, f"after that: {answer.sentence}"),
    )


def _merged(diagnoses: Sequence[RunDiagnosis], others: Sequence[RankedCause]) -> tuple[RankedCause, ...]:
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
