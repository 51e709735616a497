"""The causes of an incident in their order, each with its evidence, the decisive line first; and where it happened."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from surefoot.cases.similarity import similar_sentence
from surefoot.judge.cause_catalog import CAUSES
from surefoot.records import Action, Cause, FindingKind
from surefoot.story.cause_phrases import CAUSE_PHRASES
from surefoot.story.group_events import EventFields, whole
from surefoot.story.incident_story import FaultPlace, NamedCause

MAX_TENSORS = 3
MAX_SIMILAR = 3


def tell_causes(events: Sequence[EventFields]) -> tuple[NamedCause, ...]:
    """Every cause that was named, once: first the one that led to what was done, then by confidence."""
    named = [event for event in events if event.get("kind") == "diagnosis"]
    findings = [event for event in events if event.get("kind") == "finding"]
    lead = _leading(named, events)
    ordered = sorted(named, key=lambda event: (event is not lead, -confidence_of(event)))
    causes: dict[str, NamedCause] = {}
    for event in ordered:
        causes.setdefault(str(event.get("cause")), _named(event, findings, first=event is lead))
    return tuple(causes.values())


def _leading(named: Sequence[EventFields], events: Sequence[EventFields]) -> EventFields | None:
    """The diagnosis that counts: of a trial, else of the cause that was acted on, else the first that knows one."""
    by_trial = [event for event in named if _by_trial(event)]
    if by_trial:
        return by_trial[-1]
    acted_on = [
        event.get("cause")
        for event in events
        if event.get("kind") == "decision" and event.get("action") not in (Action.REFUSE, Action.RELAX)
    ]
    for cause in reversed(acted_on):
        about = [event for event in named if event.get("cause") == cause and cause != Cause.UNKNOWN]
        if about:
            return max(about, key=confidence_of)
    known = [event for event in named if cause_of(event) is not Cause.UNKNOWN]
    if not known:
        return named[0] if named else None
    return max((e for e in known if e.get("attempt") == known[0].get("attempt")), key=confidence_of)


def _named(event: EventFields, findings: Sequence[EventFields], *, first: bool) -> NamedCause:
    cause = cause_of(event)
    sentence, _, reason = str(event.get("detail") or "").partition(". ")
    if not reason and sentence.rstrip(".") != CAUSES[cause].sentence.rstrip("."):
        reason = sentence
    advice = event.get("advice")
    return NamedCause(
        cause=cause,
        phrase=CAUSE_PHRASES.get(cause, str(event.get("cause"))),
        sentence=f"{sentence.rstrip('.')}." if sentence and sentence != reason else CAUSES[cause].sentence,
        confidence=confidence_of(event),
        evidence=(*_evidence(cause, reason, findings if first else ()), *_similar(event)),
        advice=tuple(map(str, advice)) if isinstance(advice, list | tuple) else CAUSES[cause].remedies,
        by_trial=_by_trial(event),
    )


def _similar(event: EventFields) -> list[str]:
    """The incidents of earlier runs that were like this one."""
    cases = event.get("similar_cases")
    known = [case for case in cases[:MAX_SIMILAR] if isinstance(case, Mapping)] if isinstance(cases, list) else []
    return [similar_sentence(case) for case in known]


def _evidence(cause: Cause, reason: str, findings: Sequence[EventFields]) -> list[str]:
    """The line that decides comes first: where the value was made, if that is the cause, else the reason."""
    origins = [str(f.get("detail")) for f in findings if f.get("detector") == FindingKind.ORIGIN and _names(f, cause)]
    first: dict[str, str] = {}  # one line for each detector: refusals in a row would fill the page
    for finding in findings:
        if finding.get("detail"):
            first.setdefault(str(finding.get("detector")), f"step {finding.get('step')}: {finding.get('detail')}")
    lines = [*origins, reason, *first.values()]
    kept: list[str] = []
    for line in filter(None, lines):
        words = line.partition(": ")[2] if line.startswith("step ") else line
        if not any(words in earlier for earlier in kept):  # another line may say it already, and more
            kept.append(line)
    return kept


def _names(origin: EventFields, cause: Cause) -> bool:
    evidence = origin.get("evidence")
    return isinstance(evidence, Mapping) and evidence.get("cause") == cause


def cause_of(event: EventFields) -> Cause:
    """The cause of an event; UNKNOWN too if this version does not know it."""
    return next((cause for cause in Cause if cause == event.get("cause")), Cause.UNKNOWN)


def confidence_of(event: EventFields) -> float:
    value = event.get("confidence")
    return float(value) if isinstance(value, int | float) else 0.0


def _by_trial(event: EventFields) -> bool:
    evidence = event.get("evidence")
    return isinstance(evidence, Mapping) and "trial" in evidence


def tell_path(events: Sequence[EventFields]) -> str:
    """The decision tree's questions with their answers."""
    for event in events:
        evidence = event.get("evidence")
        if event.get("kind") == "diagnosis" and isinstance(evidence, Mapping) and evidence.get("path"):
            return str(evidence["path"])
    return ""


def tell_place(events: Sequence[EventFields]) -> FaultPlace:
    """Where it happened: what the first finding about each of them says."""
    known: dict[str, Any] = {}
    for event in events:
        for name, value in _places(event):
            known.setdefault(name, value)
    return FaultPlace(**known)


def _places(event: EventFields) -> list[tuple[str, Any]]:
    evidence = event.get("evidence")
    if event.get("kind") == "note":
        return _tensors(event)
    if event.get("kind") != "finding" or not isinstance(evidence, Mapping):
        return []
    places: list[tuple[str, Any]] = []
    if whole(evidence.get("culprit_rank")) >= 0:
        places.append(("rank", whole(evidence["culprit_rank"])))
    if whole(evidence.get("bad_microbatch")) >= 0:
        places.append(("microbatch", whole(evidence["bad_microbatch"])))
    return [*places, *_origin(evidence)] if event.get("detector") == FindingKind.ORIGIN else places


def _tensors(note: EventFields) -> list[tuple[str, Any]]:
    """The tensors with the most unusual gradients."""
    values = note.get("values")
    listed = values.get("tensors") if note.get("name") == "tensors" and isinstance(values, Mapping) else None
    names = [str(t.get("name")) for t in listed if isinstance(t, Mapping)] if isinstance(listed, list) else []
    return [("tensors", tuple(names[:MAX_TENSORS]))] if names else []


def _origin(evidence: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The module, and what is known of the operation in it."""
    places: list[tuple[str, Any]] = []
    module, kind = str(evidence.get("module") or ""), str(evidence.get("kind") or "")
    if module or kind:
        places.append(("module", f"{module or 'the model'} ({kind})" if kind else module))
    origin = evidence.get("origin")
    if not isinstance(origin, Mapping):
        return places
    backward = "the backward pass of " if origin.get("backward") else ""
    if origin.get("operation"):
        places.append(("operation", f"{backward}{origin['operation']}"))
    if origin.get("file"):
        places.append(("code", f"{origin['file']}:{origin.get('line')}: {origin.get('code') or ''}".rstrip(": ")))
    for name in ("samples", "dataset_samples"):
        if isinstance(origin.get(name), list | tuple) and origin[name]:
            places.append((name, tuple(map(whole, origin[name]))))
    if whole(origin.get("num_microbatches")) > 1:
        places.append(("microbatch", whole(origin.get("microbatch"))))
    return places
