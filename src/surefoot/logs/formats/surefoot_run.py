"""A run directory of our own as a table: the numbers of every attempted update, and what was said and done."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.journal import reader
from surefoot.journal.run_json import RUN, SIGNALS
from surefoot.journal.strict_json import loads_object
from surefoot.logs.log_diagnosis import UnreadableInput
from surefoot.logs.table import LogTable, RunDiagnosis, TableBuilder
from surefoot.records import Verdict

FORMAT = "run"
_COLUMN_NAMES = {"norm": "grad_norm"}
_SKIPPED_COLUMNS = frozenset(
    {"verdict", "optimizer", "bad_microbatch", "num_microbatches", "rank", "loss_d1", "loss_d2"}
)
_MAX_EVENT_NOTES = 12
_INTERVENTIONS = ("constrain", "rewind", "stop")
"""Decisions that change the run beyond leaving out an update."""
_RECENT_ATTEMPTS = 20
"""Attempts before a diagnosis within which a finding belongs to it."""
_NOTED_KINDS = ("diagnosis", "decision", "incident")


def is_run_dir(path: str | os.PathLike[str]) -> bool:
    """Whether a folder is a run directory."""
    folder = Path(path)
    try:
        if (folder / SIGNALS).is_dir() and any((folder / SIGNALS).glob("scalars*")):
            return True
        file = folder / RUN
        return file.is_file() and "surefoot" in (loads_object(file.read_bytes()[: 1 << 20]) or {})
    except OSError:
        return False


def run_dir_of(file: str) -> Path | None:
    """The run directory that a file is a part of, or None: who passes a part means the whole."""
    path = Path(file)
    if path.name == RUN or (path.name.startswith("events") and path.suffix == ".jsonl"):
        return path.parent if is_run_dir(path.parent) else None
    return path.parent.parent if path.parent.name == SIGNALS and is_run_dir(path.parent.parent) else None


def read_run_dir(path: str | os.PathLike[str]) -> LogTable:
    """The rows of the run; diagnoses and decisions become notes, and facts for whoever judges."""
    try:
        run = reader.read(path)
    except (OSError, ValueError) as error:
        raise UnreadableInput(str(error)) from None
    gatherer = TableBuilder()
    for note in run.notes:
        gatherer.note(note)
    if run.skipped:
        gatherer.skip("events that could not be parsed", run.skipped)
    if run.scalars.rows:
        _add_rows(run.scalars, gatherer)
    elif not run.events:
        raise UnreadableInput(f"{path} is the directory of a run that recorded nothing yet")
    _note_events(run.events, gatherer)
    for name in ("model", "optimizer", "policy", "clip"):
        value = run.info.get(name)
        if isinstance(value, str) and len(value) < 200:
            gatherer.settings[name] = value
        elif isinstance(value, int | float):
            gatherer.settings[name] = float(value)
    return replace(gatherer.build(FORMAT, str(path)), diagnoses=_diagnoses(run.events))


def _diagnoses(events: list[dict[str, Any]]) -> tuple[RunDiagnosis, ...]:
    """The diagnoses of a run, each cause once an attempt, with the findings and the decision that belong to it."""
    findings = [event for event in events if event.get("kind") == "finding"]
    decisions = {
        event.get("attempt"): event
        for event in events
        if event.get("kind") == "decision" and event.get("action") in _INTERVENTIONS
    }
    found: dict[tuple[int, str], RunDiagnosis] = {}
    for event in events:
        step, attempt = event.get("step"), event.get("attempt")
        if event.get("kind") != "diagnosis" or not isinstance(step, int) or not isinstance(attempt, int):
            continue
        decision = decisions.get(attempt, {})
        confidence, advice = event.get("confidence"), event.get("advice")
        cause = str(event.get("cause", "unknown"))
        one = RunDiagnosis(
            step=step,
            attempt=attempt,
            cause=cause,
            confidence=float(confidence) if isinstance(confidence, int | float) else 0.0,
            evidence=(*_reason(event), *_finding_evidence(event, attempt, findings)),
            advice=tuple(map(str, advice)) if isinstance(advice, list) else (),
            decided=bool(decision),
            applied=str(decision.get("action")) if decision and decision.get("applied", True) else "",
        )
        found.setdefault((attempt, cause), one)
    return tuple(sorted(found.values(), key=lambda one: (one.attempt, -one.confidence)))


def _reason(event: dict[str, Any]) -> list[str]:
    """Why the cause was named; the detail begins with the cause in words, which stands above it already."""
    detail = str(event.get("detail") or "")
    return [detail.partition(". ")[2] or detail] if detail else []


def _finding_evidence(event: dict[str, Any], attempt: int, findings: list[dict[str, Any]]) -> list[str]:
    """What the detectors that the diagnosis rests on had last said by then."""
    evidence = event.get("evidence")
    names = evidence.get("findings", ()) if isinstance(evidence, dict) else ()
    last: dict[str, str] = {}
    for finding in findings:
        at, name, detail = finding.get("attempt"), finding.get("detector"), finding.get("detail")
        if name in names and detail and isinstance(at, int) and attempt - _RECENT_ATTEMPTS < at <= attempt:
            last[str(name)] = f"step {finding.get('step')}: {detail}"
    reason = _reason(event)
    return [words for words in last.values() if words.partition(": ")[2] not in reason]


def _add_rows(scalars: reader.Scalars, gatherer: TableBuilder) -> None:
    verdicts = np.asarray(scalars["verdict"]) if "verdict" in scalars else np.zeros(scalars.rows)
    mine = np.asarray(scalars["optimizer"]) == 0 if "optimizer" in scalars else np.ones(scalars.rows, np.bool_)
    verdicts = verdicts[mine]
    broken = verdicts == Verdict.NONFINITE
    rows = np.arange(len(verdicts), dtype=np.int64)
    for name in scalars:
        if name in _SKIPPED_COLUMNS:
            continue
        values = np.asarray(scalars[name])[mine].astype(np.float64)
        # NaN stands for "unknown" in a row, unless the update was refused for being no number.
        known = ~np.isnan(values) | (broken & (name in ("loss", "norm")))
        if not np.isnan(values).all() or (name == "loss" and known.any()):
            gatherer.add_values(_COLUMN_NAMES.get(name, name), rows[known], values[known])
    gatherer.records = len(rows)
    skipped = verdicts == Verdict.OVERFLOW
    if skipped.any():
        gatherer.add_values("skipped", rows, np.cumsum(skipped).astype(np.float64))
    refused = int((broken | (verdicts == Verdict.NORM_OUTLIER)).sum())
    if refused:
        gatherer.settings["refused"] = float(refused)
        gatherer.note(f"{refused} updates were refused before they reached the weights")


def _note_events(events: list[dict[str, Any]], gatherer: TableBuilder) -> None:
    told = [event for event in events if event.get("kind") in _NOTED_KINDS]
    diagnosed: list[str] = []
    decided: list[str] = []
    for event in told:
        step = event.get("step")
        if event["kind"] == "diagnosis":
            diagnosed.append(f"{event.get('cause', 'unknown')}@{step}")
        elif event["kind"] == "decision":
            decided.append(f"{event.get('action', 'unknown')}@{step}")
    for line in [_describe_event(event) for event in told][:_MAX_EVENT_NOTES]:
        gatherer.note(line)
    if len(told) > _MAX_EVENT_NOTES:
        gatherer.note(f"and {len(told) - _MAX_EVENT_NOTES} more diagnoses and decisions, in the events of the run")
    # The last of them: what the run ended with.
    if diagnosed:
        gatherer.settings["diagnosed"] = " ".join(diagnosed[-20:])
    if decided:
        gatherer.settings["decided"] = " ".join(decided[-20:])


def _describe_event(event: dict[str, Any]) -> str:
    step, kind = event.get("step"), event["kind"]
    if kind == "diagnosis":
        sure = event.get("confidence")
        share = f" ({sure:.0%} sure)".replace("%", " %") if isinstance(sure, float) else ""
        return f"step {step}: diagnosed while it ran as {event.get('cause')}{share}. {event.get('detail', '')}".strip()
    if kind == "decision":
        done = "" if event.get("applied", True) else " (only told, not done)"
        return f"step {step}: {event.get('action')}{done}, because {event.get('reason', 'of no known reason')}"
    return f"step {step}: {kind} {event.get('name', '')} {event.get('detail', '')}".strip()
