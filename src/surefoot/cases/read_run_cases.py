"""The cases of one run directory: its events, put together incident by incident."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.cases.case_record import REFUSE, UNKNOWN, Case, number, text
from surefoot.cases.model_family import WRAPPERS, family_of, phase_of
from surefoot.journal.reader import Run, read
from surefoot.journal.row_file import file_size
from surefoot.journal.run_json import RUN_JSON
from surefoot.records import Action, FindingKind, Severity, Verdict

GAP = 50
"""Attempts without trouble after which what follows is another incident."""
MAX_EVENT_BYTES, MAX_INFO_BYTES = 1 << 28, 1 << 24
"""Sizes above which a run is not read."""
MAX_CASES = 1000
"""Incidents of one run that are read."""
LOSS_ROWS, MIN_ROWS_AFTER = 20, 5
"""Updates before and after an incident whose median losses are compared; fewer after it are no outcome."""
STILL_GOOD_RATIO = 1.5
"""An incident that only led to refusals is over well if the loss is at most this many times what it was."""
_CHANGING = (Action.REFUSE, Action.CONSTRAIN, Action.REWIND, Action.ACCEPT, Action.STOP)


class UnreadableRun(ValueError):
    """A folder cannot be read as a run; the message says why, in one line."""


def run_cases(path: Path, name: str, *, max_event_bytes: int = MAX_EVENT_BYTES) -> list[Case]:
    """The cases of a run, under this name, oldest first; raises UnreadableRun."""
    run = _read(path, max_event_bytes)
    config = run.info.get("config")
    model = _model_facts(run, config if isinstance(config, Mapping) else {})
    incidents = list(_incidents(run.events))[:MAX_CASES]
    return [_case(incident, run, name, model) for incident in incidents]


def _read(path: Path, max_event_bytes: int) -> Run:
    try:
        events = sum(file_size(file) for file in path.glob("events*.jsonl"))
        if events > max_event_bytes or file_size(path / RUN_JSON) > MAX_INFO_BYTES:
            raise UnreadableRun(f"its events or {RUN_JSON} are too large to read ({events:,} bytes of events)")
        run = read(path)
    except UnreadableRun:
        raise
    except Exception as error:  # a damaged run may fail in many ways; the others are still read
        raise UnreadableRun(text(f"{type(error).__name__}: {error}", 200)) from None
    if "surefoot" not in run.info and not run.scalars.rows:
        raise UnreadableRun(
            f"its {RUN_JSON} is not of a surefoot run" if run.info else f"it has no readable {RUN_JSON}"
        )
    return run


@dataclass(frozen=True, slots=True)
class _ModelFacts:
    model: str
    family: str
    optimizer: str


def _model_facts(run: Run, config: Mapping[str, Any]) -> _ModelFacts:
    judged, optimizers = config.get("judged"), config.get("optimizers")
    kinds = judged.get("kinds") if isinstance(judged, Mapping) else None
    kinds = [kind for kind in kinds if isinstance(kind, str)] if isinstance(kinds, list) else []
    first = optimizers[0] if isinstance(optimizers, list) and optimizers else None
    optimizer = text(first.get("class")) if isinstance(first, Mapping) else ""
    model = text(config.get("model"))
    recipe = run.info.get("recipe")
    resolved = recipe.get("resolved") if isinstance(recipe, Mapping) else None
    section = resolved.get("model") if isinstance(resolved, Mapping) else None
    factory = text(section.get("factory")) if isinstance(section, Mapping) else ""
    if factory:
        model = factory.rpartition(":")[2]
    elif model in WRAPPERS:
        model = ""
    return _ModelFacts(model, family_of(list(run.layers)[: len(kinds) or None], kinds), optimizer)


@dataclass(slots=True)
class _Incident:
    """The events of one incident."""

    events: list[dict[str, Any]] = field(default_factory=list)
    first: int = -1
    last: int = -1

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event.get("kind") == kind]


def _incidents(events: Iterable[dict[str, Any]]) -> Iterable[_Incident]:
    """Trouble that is at least so many attempts apart is two incidents; an outcome belongs to the last one."""
    current = _Incident()
    for event in events:
        attempt, kind = event.get("attempt"), event.get("kind")
        if type(attempt) is not int:
            continue
        follows = bool(current.events) and attempt - current.last <= GAP
        begins = _is_trouble(event)
        if begins and not follows:
            if _counts(current):
                yield current
            current = _Incident(first=attempt)
        elif not begins and not (current.events and (kind == "outcome" or (follows and _belongs(event)))):
            continue
        current.events.append(event)
        if begins:
            current.last = max(current.last, attempt)
    if _counts(current):
        yield current


def _is_trouble(event: Mapping[str, Any]) -> bool:
    if event.get("kind") == "finding":
        return event.get("severity") != Severity.REPORT_ONLY
    return event.get("kind") == "decision" and event.get("action") in _CHANGING


def _belongs(event: Mapping[str, Any]) -> bool:
    banned = event.get("kind") == "note" and event.get("name") == "banned"
    return banned or event.get("kind") in ("diagnosis", "trial")


def _counts(incident: _Incident) -> bool:
    """Suspicions that led to nothing are no case."""
    return bool(incident.of("diagnosis") or incident.of("decision"))


def _case(incident: _Incident, run: Run, name: str, model: _ModelFacts) -> Case:
    diagnoses, decisions = incident.of("diagnosis"), incident.of("decision")
    shown = [d for d in diagnoses if "trial" in _mapping(d.get("evidence"))]
    main = (shown or diagnoses or [{}])[-1 if shown else 0]
    causes = _unique([main.get("cause"), *(d.get("cause") for d in diagnoses), *(d.get("cause") for d in decisions)])
    causes = tuple(cause for cause in causes if cause != UNKNOWN)
    left_alone = [_mapping(_mapping(t.get("values")).get("dismissed")).get("attempt") for t in incident.of("trial")]
    decisions = [d for d in decisions if d.get("action") == REFUSE or d.get("attempt") not in left_alone]
    actions = _unique(d.get("action") for d in decisions if d.get("action") in _CHANGING)
    findings = incident.of("finding")
    origin = next((e for e in map(_origin, findings) if e), {})
    trial = next((t for t in reversed(incident.of("trial")) if t.get("result") in ("continued", "rewound")), None)
    values = _mapping(trial.get("values")) if trial else {}
    outcomes = [o for o in incident.of("outcome") if isinstance(o.get("helped"), bool)]
    before, after = _losses(run, incident)
    helped: bool | None = bool(outcomes[-1]["helped"]) if outcomes else None
    if not outcomes and actions == (REFUSE,) and before is not None and after is not None:
        helped = after <= before + (STILL_GOOD_RATIO - 1) * abs(before)
    banned = [_mapping(note.get("values")).get("samples") for note in incident.of("note")]
    step = incident.events[0].get("step")
    step = step if type(step) is int else -1
    return Case(
        run=text(name),
        step=step,
        cause=causes[0] if causes else UNKNOWN,
        confidence=number(main.get("confidence")) or 0.0,
        causes=causes[:5],
        findings=_unique(f.get("detector") for f in findings),
        patterns=_unique(f.get("pattern") for f in findings if f.get("pattern") != "none"),
        module=text(origin.get("module")),
        operation=text(origin.get("operation")),
        model=model.model,
        family=model.family,
        optimizer=model.optimizer,
        phase=phase_of(step),
        actions=actions,
        remedies=_unique(d.get("remedy_id") for d in decisions if d.get("remedy_id")),
        branches=_branches(values),
        best=text(values.get("best")),
        banned=sum(len(samples) for samples in banned if isinstance(samples, list)),
        helped=helped,
        loss_before=before,
        loss_after=after,
    )


def _origin(finding: Mapping[str, Any]) -> Mapping[str, Any]:
    """The origin that a finding names: module and operation."""
    evidence = _mapping(finding.get("evidence"))
    if finding.get("detector") != FindingKind.ORIGIN:
        return {}
    return {"module": evidence.get("module"), "operation": _mapping(evidence.get("origin")).get("operation")}


def _branches(values: Mapping[str, Any]) -> dict[str, float | None]:
    listed = values.get("branches")
    tried = [_mapping(branch) for branch in listed[:20]] if isinstance(listed, list) else []
    return {text(branch.get("branch")): number(branch.get("probe_loss")) for branch in tried if branch.get("branch")}


def _losses(run: Run, incident: _Incident) -> tuple[float | None, float | None]:
    """The median loss of the applied updates right before the incident, and after it."""
    if not {"attempt", "loss", "verdict"} <= set(run.scalars):
        return None, None
    attempts, losses = np.asarray(run.scalars["attempt"]), np.asarray(run.scalars["loss"], np.float64)
    good = (np.asarray(run.scalars["verdict"]) == Verdict.APPLIED) & np.isfinite(losses)
    end = max([incident.last, *(e["attempt"] for e in incident.of("outcome") if type(e.get("attempt")) is int)])
    before, after = losses[good & (attempts < incident.first)], losses[good & (attempts > end)]
    return (
        float(np.median(before[-LOSS_ROWS:])) if len(before) else None,
        float(np.median(after[:LOSS_ROWS])) if len(after) >= MIN_ROWS_AFTER else None,
    )


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _unique(values: Iterable[object]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word for word in map(text, values) if word))


def run_name(run: Path, folder: Path) -> str:
    """The run's folder relative to the one that was searched, or its own name."""
    relative = os.path.relpath(run, folder)
    return run.resolve().name if relative == "." else Path(relative).as_posix()
