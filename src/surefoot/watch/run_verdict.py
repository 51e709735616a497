"""The verdict on a run and its incidents, from its events: the one place that says how a run is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from surefoot.logs.log_diagnosis import RunHealth
from surefoot.logs.report.wording import CAUSE_PHRASES, clean
from surefoot.records import Action, Cause
from surefoot.watch.current_numbers import CurrentNumbers
from surefoot.watch.run_state import RunState, StateReport

_SAME_INCIDENT = 60
"""Attempts within which events belong to the same incident."""
_IN_A_ROW = 10
"""Attempts within which refusals, and what they lead to, are one incident."""
_RECENT = 200
"""Attempts for which an incident without a known outcome is a warning."""
_APPLIED_AGAIN = 5
"""Attempts after a refusal from which it counts as having helped."""
_ACTIONS = {Action.REFUSE, Action.REWIND, Action.CONSTRAIN, Action.STOP, Action.ACCEPT}


@dataclass(frozen=True, slots=True, kw_only=True)
class IncidentView:
    """One incident as people see it: what happened, why, what was done, whether it helped."""

    step: int
    attempt: int
    last_attempt: int
    action: str
    applied: bool
    reason: str
    remedy: str = ""
    cause: str = ""
    confidence: float = 0.0
    evidence: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    outcome: str = ""
    helped: bool | None = None
    trial: tuple[dict[str, Any], ...] = ()
    """The branches that were tried, with their probe losses."""
    folder: str = ""
    refused: int = 0


@dataclass(frozen=True, slots=True)
class LiveVerdict:
    """healthy, warning, failed or unknown, in a sentence, with the incidents."""

    health: RunHealth
    sentence: str
    incidents: tuple[IncidentView, ...] = field(default=())


def verdict_of(events: Sequence[Mapping[str, Any]], numbers: CurrentNumbers, state: StateReport) -> LiveVerdict:
    """How the run is: what its process does, what its last incident was, and whether that is over."""
    incidents = incidents_of(events)
    last = incidents[-1] if incidents else None
    if state.state is RunState.DELETED:
        health, sentence = RunHealth.UNKNOWN, "the run directory was deleted; shown is what was read before"
    elif last is not None and last.action == Action.STOP:
        health, sentence = RunHealth.FAILED, f"surefoot stopped the run at step {last.step:,}: {last.reason}"
    elif state.state is RunState.DIED:
        health, sentence = RunHealth.FAILED, f"the run died after step {numbers.step:,}: {state.detail}"
    elif numbers.step < 0:
        health, sentence = RunHealth.UNKNOWN, f"no update yet; {state.detail}"
    else:
        health, sentence = _living(last, len(incidents), numbers, ended=state.state is RunState.ENDED)
    return LiveVerdict(health, sentence, incidents)


def _living(last: IncidentView | None, count: int, numbers: CurrentNumbers, *, ended: bool) -> tuple[RunHealth, str]:
    where = f"{'ended' if ended else 'running'} at step {numbers.step:,}"
    if last is None:
        return RunHealth.HEALTHY, f"{where}, no incident"
    summary = f"{where}, {_count(count, 'incident')}; the last at step {last.step:,}: {describe(last)}"
    helped = last.helped
    since = numbers.attempt - last.last_attempt
    if helped is None and last.action == Action.REFUSE and since >= _APPLIED_AGAIN and math.isfinite(numbers.loss):
        helped = True
    if helped is False:
        return RunHealth.WARNING, f"{summary}; it did not help"
    if helped is None and not ended and since < _RECENT:
        return RunHealth.WARNING, summary
    return RunHealth.HEALTHY, summary + ("; it helped" if helped else "")


def describe(incident: IncidentView) -> str:
    """The action and the cause in a few words."""
    verb = {
        Action.REFUSE: f"{_count(incident.refused, 'update')} refused",
        Action.REWIND: "rewound",
        Action.CONSTRAIN: "constrained",
        Action.ACCEPT: "accepted as a new normal",
        Action.STOP: "stopped",
    }.get(Action(incident.action), incident.action)
    verb = verb if incident.applied else f"would be {verb}"
    return f"{verb}: {incident.cause or clean(incident.reason, 160)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def incidents_of(events: Sequence[Mapping[str, Any]]) -> tuple[IncidentView, ...]:
    """Decisions grouped with the diagnosis, trial, outcome and bundle that belong to them."""
    incidents: list[dict[str, Any]] = []
    diagnosis: Mapping[str, Any] = {}
    for event in events:
        kind, attempt = event.get("kind"), event.get("attempt", -1)
        current = incidents[-1] if incidents else None
        near = current is not None and attempt - current["last_attempt"] <= _SAME_INCIDENT
        if kind == "decision" and event.get("action") in _ACTIONS:
            _decide(incidents, event, near=near and attempt - incidents[-1]["last_attempt"] <= _IN_A_ROW)
            if diagnosis.get("attempt") == attempt:  # it is written before the decision that follows from it
                _add_to(incidents[-1], diagnosis)
        elif kind == "diagnosis" and not near:
            if diagnosis.get("attempt") != attempt:  # the likeliest cause comes first
                diagnosis = event
        elif current is not None and near:
            _add_to(current, event)
    return tuple(IncidentView(**incident) for incident in incidents)


def _decide(incidents: list[dict[str, Any]], event: Mapping[str, Any], *, near: bool) -> None:
    action = str(event["action"])
    if near and (action == Action.REFUSE or incidents[-1]["action"] == Action.REFUSE):
        current = incidents[-1]  # a row of refusals, or refusals that led to more
        current["last_attempt"] = event["attempt"]
        current["refused"] += action == Action.REFUSE
        if action != Action.REFUSE:
            current |= {"action": action, "reason": clean(event.get("reason", "")), "helped": None}
            current["remedy"] = clean(event.get("remedy") or "")
        return
    incidents.append(
        {
            "step": event["step"],
            "attempt": event["attempt"],
            "last_attempt": event["attempt"],
            "action": action,
            "applied": event.get("applied") is not False,
            "reason": clean(event.get("reason", "")),
            "remedy": clean(event.get("remedy") or ""),
            "cause": _phrase(event.get("cause")),
            "refused": int(action == Action.REFUSE),
        }
    )


def _add_to(incident: dict[str, Any], event: Mapping[str, Any]) -> None:
    kind, values = event.get("kind"), event.get("values")
    values = values if isinstance(values, dict) else {}
    if kind == "diagnosis" and not incident.get("confidence"):
        confidence = event.get("confidence")
        incident["cause"] = _phrase(event.get("cause"))
        incident["confidence"] = float(confidence) if isinstance(confidence, int | float) else 0.0
        incident["evidence"] = (clean(event.get("detail", "")),)
        advice = event.get("advice")
        incident["advice"] = tuple(clean(line) for line in advice) if isinstance(advice, list) else ()
    elif kind == "trial":
        branches = values.get("branches")
        incident["trial"] = tuple(b for b in branches if isinstance(b, dict)) if isinstance(branches, list) else ()
        if event.get("detail"):
            incident["evidence"] = (*incident.get("evidence", ()), clean(event["detail"]))
    elif kind == "outcome":
        incident["outcome"], incident["helped"] = clean(event.get("detail", "")), bool(event.get("helped"))
    elif kind == "note" and event.get("name") == "incident":
        incident["folder"] = clean(values.get("folder", ""), 100)


def _phrase(cause: object) -> str:
    """The cause in words; empty for an unknown one."""
    known = next((phrase for name, phrase in CAUSE_PHRASES.items() if name == cause), clean(cause or "", 60))
    return "" if cause in (None, "", Cause.UNKNOWN) else known


def incident_json(incident: IncidentView) -> dict[str, Any]:
    return asdict(incident)
