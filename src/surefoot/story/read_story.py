"""Reads the story of a run from what its journal holds: live, finished, killed, of an earlier version, or damaged."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.journal.lock import writer_is_alive
from surefoot.journal.reader import Run
from surefoot.journal.strict_json import loads_object
from surefoot.records import Action, Verdict
from surefoot.story.group_events import EventFields, EventGrouper, whole
from surefoot.story.incident_story import IncidentStory
from surefoot.story.row_facts import RowFacts
from surefoot.story.run_ending import ended_before, health_of, how_it_ended, run_sentence
from surefoot.story.run_story import RunStory, RunVerdict, SavedCheckpoint, SavedWork
from surefoot.story.tell_incident import tell_incident

CHECKPOINTS_DIR = "checkpoints"
_STEP_PREFIX = "step-"


def tell_run(run: Run) -> RunStory:
    """What happened in this run."""
    rows = RowFacts.of(run.scalars)
    grouper = EventGrouper()
    for event in run.events:
        grouper.add(event)
    incidents = tuple(tell_incident(group, rows) for group in grouper.groups)
    ending, ended = how_it_ended(run.events, alive=writer_is_alive(run.path))
    if ending is not RunVerdict.RUNNING:
        incidents = tuple(ended_before(incident) for incident in incidents)
    losses = _applied_losses(run)
    last_step = _last_step(run)
    health = health_of(ending, incidents, rows)
    evals = [float(e["values"]["eval_loss"]) for e in run.events if _has_eval(e)]
    story = RunStory(
        path=str(run.path),
        verdict=ending if ending in (RunVerdict.RUNNING, RunVerdict.KILLED) else health,
        health=health,
        headline="",
        ended=ended,
        started=_number(run.info.get("started")),
        updated=max([_last_time(run), *(_number(e.get("time")) for e in run.events[-1:])], default=0.0),
        last_step=last_step,
        attempts=0 if not rows.attempts else rows.attempts[-1] + 1,
        first_loss=float(losses[0]) if len(losses) else None,
        last_loss=float(losses[-1]) if len(losses) else None,
        best_eval_loss=min(evals, default=None),
        last_eval_loss=evals[-1] if evals else None,
        ranks=max(1, whole((run.info.get("config") or {}).get("processes") if _is_map(run.info.get("config")) else 1)),
        incidents=incidents,
        checkpoints=tuple(_checkpoints(run)),
        saved=_saved_work(incidents, rows, run.events),
        notes=(*run.notes, *([f"{run.skipped} event lines could not be parsed"] if run.skipped else [])),
    )
    return replace(story, headline=f"{story.verdict.upper()}  {run_sentence(story)}")


# -- figures


def _applied_losses(run: Run) -> np.ndarray:
    """Finite losses of the updates that were applied and that no rewind has undone."""
    if not run.scalars.rows or "loss" not in run.scalars or "step" not in run.scalars:
        return np.empty(0)
    losses, steps = np.asarray(run.scalars["loss"], np.float64), np.asarray(run.scalars["step"], np.float64)
    # A row whose step number comes again later was undone, or belongs to a further optimizer of the same step.
    next_lowest = np.append(np.minimum.accumulate(steps[::-1])[::-1][1:], np.inf)
    keep = np.isfinite(losses) & (steps < next_lowest)
    if "verdict" in run.scalars:
        keep &= np.asarray(run.scalars["verdict"]) == Verdict.APPLIED
    return losses[keep]


def _last_step(run: Run) -> int | None:
    if not run.scalars.rows or "step" not in run.scalars:
        return None
    applied = not run.scalars["verdict"][-1] if "verdict" in run.scalars else True
    return int(run.scalars["step"][-1]) + int(applied)


def _last_time(run: Run) -> float:
    return float(run.scalars["time"][-1]) if run.scalars.rows and "time" in run.scalars else 0.0


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def _is_map(value: Any) -> bool:
    return isinstance(value, Mapping)


def _has_eval(event: EventFields) -> bool:
    values = event.get("values")
    value = values.get("eval_loss") if isinstance(values, Mapping) else None
    return event.get("name") == "report" and isinstance(value, int | float) and math.isfinite(value)


# -- checkpoints, and what was saved


def _checkpoints(run: Run) -> list[SavedCheckpoint]:
    """Those on disk, and those that were saved and dropped since, by step."""
    times = {
        whole((e.get("values") or {}).get("step", e.get("step"))): _number(e.get("time"))
        for e in run.events
        if e.get("kind") == "checkpoint" and e.get("name") == "saved"
    }
    on_disk: dict[int, str] = {}
    folder = run.path / CHECKPOINTS_DIR
    for path in folder.iterdir() if folder.is_dir() else ():
        number = path.name.removeprefix(_STEP_PREFIX)
        if path.name.startswith(_STEP_PREFIX) and number.isdigit() and (path / "manifest.json").is_file():
            on_disk[int(number)] = _health_mark(path)
            times.setdefault(int(number), path.stat().st_mtime)
    return [
        SavedCheckpoint(step=step, time=times[step], on_disk=step in on_disk, health=on_disk.get(step, ""))
        for step in sorted(times)
    ]


def _health_mark(path: Path) -> str:
    try:
        marks = loads_object((path / "health.json").read_bytes()) or {}
    except OSError:
        return ""
    return str(marks.get("health") or marks.get("mark") or marks.get("state") or "")


def _saved_work(incidents: Sequence[IncidentStory], rows: RowFacts, events: Sequence[EventFields]) -> SavedWork:
    actions = [action for incident in incidents for action in incident.actions if action.applied and action.done]
    rewinds = [action for action in actions if action.action == Action.REWIND]
    refused = rows.refused_between(0, rows.attempts[-1]) if rows.attempts else sum(i.refused for i in incidents)
    return SavedWork(
        refused=refused,
        rewinds=len(rewinds),
        updates_lost=sum(action.updates_lost or 0 for action in rewinds),
        updates_kept=sum(action.updates_kept for action in rewinds),
        resumes=sum(e.get("kind") == "checkpoint" and e.get("name") == "resumed" for e in events),
    )
