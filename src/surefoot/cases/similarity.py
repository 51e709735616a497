"""Which old cases are most like a new incident, and what helped in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.cases.case_record import REFUSE, UNKNOWN, Case, number, text

MAX_SIMILAR = 3
SAME_CAUSE, NAMED_CAUSE, SAME_FINDINGS = 4.0, 2.0, 3.0
SAME_FAMILY, SAME_OPTIMIZER, SAME_PHASE = 2.0, 1.0, 1.0
MIN_SCORE = 6.0
"""What a case must reach: neither the same model nor the same cause alone makes it similar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewIncident:
    """What is known of an incident when it is diagnosed."""

    causes: Sequence[str]
    """The likeliest first."""
    findings: Sequence[str]
    family: str
    optimizer: str
    phase: str


def similarity(case: Case, incident: NewIncident) -> float:
    """How much a case is like an incident, 0 to 11."""
    cause = incident.causes[0] if incident.causes else UNKNOWN
    if cause != UNKNOWN and cause == case.cause:
        score = SAME_CAUSE
    else:
        score = NAMED_CAUSE if {cause, *incident.causes} & {case.cause, *case.causes} - {UNKNOWN} else 0.0
    found, known = set(incident.findings), set(case.findings)
    score += SAME_FINDINGS * len(found & known) / len(found | known) if found | known else 0.0
    if score <= 0:
        return 0.0
    score += SAME_FAMILY * (case.family == incident.family) + SAME_OPTIMIZER * (case.optimizer == incident.optimizer)
    return score + SAME_PHASE * (case.phase == incident.phase)


def most_similar(cases: Sequence[Case], incident: NewIncident) -> list[tuple[float, Case]]:
    """Up to three cases with their scores, the most similar first; of equals, those in which something helped."""
    scored = [(round(similarity(case, incident), 3), case) for case in cases]
    scored = [pair for pair in scored if pair[0] >= MIN_SCORE]
    scored.sort(key=lambda pair: (-pair[0], pair[1].helped is not True, pair[1].run, pair[1].step))
    return scored[:MAX_SIMILAR]


def remedies_that_helped(similar: Sequence[tuple[float, Case]]) -> list[str]:
    """What was done in similar cases in which it helped, beyond refusing updates; of the most similar case first."""
    return [case.remedy for _, case in similar if case.helped and case.remedy not in ("", REFUSE)]


def as_event_field(similar: Sequence[tuple[float, Case]]) -> tuple[dict[str, Any], ...]:
    """The field `similar_cases` of a diagnosis."""
    names = ("run", "step", "cause", "model", "family", "optimizer", "phase", "helped", "loss_before", "loss_after")
    return tuple(
        {name: getattr(case, name) for name in names} | {"remedy": case.remedy, "score": score}
        for score, case in similar
    )


def similar_sentence(values: Mapping[str, Any]) -> str:
    """One item of that field in words."""
    where = f"{text(values.get('run')) or 'a run'}, step {text(values.get('step'))}"
    model = "/".join(filter(None, (text(values.get("family")), text(values.get("optimizer")))))
    done, helped = text(values.get("remedy")).replace("_", " "), values.get("helped")
    outcome = f"{done or 'what was done'} {'helped' if helped else 'did not help'}"
    outcome = outcome if isinstance(helped, bool) else f"{done or 'nothing'} was done, the outcome is not known"
    before, after = number(values.get("loss_before")), number(values.get("loss_after"))
    losses = f" (loss {before:.4g} before, {after:.4g} after)" if before is not None and after is not None else ""
    cause = text(values.get("cause")).replace("_", " ")
    return f"similar: {where}, {cause}" + (f" in {model}" if model else "") + f": {outcome}{losses}"
