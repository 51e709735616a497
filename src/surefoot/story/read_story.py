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
from surefoot.story.incident_story import IncidentLevel, IncidentStory
from surefoot.story.row_facts import RowFacts
from surefoot.story.run_story import RunStory, RunVerdict, SavedCheckpoint, SavedWork
from surefoot.story.tell_incident import NOT_KNOWN, tell_incident

CHECKPOINTS_DIR = "checkpoints"
_STEP_PREFIX = "step-"
UNKNOWN_OUTCOME = "not known: the run ended before it showed"


def tell_run(run: Run) -> RunStory:
    """What happened in this run."""
    rows = RowFacts.of(run.scalars)
    grouper = EventGrouper()
    for event in run.events:
        grouper.add(event)
    incidents = tuple(tell_incident(group, rows) for group in grouper.groups)
    ending, ended = _ending(run.events, writer_is_alive(run.path))
    if ending is not RunVerdict.RUNNING:
        incidents = tuple(_ended_before(incident) for incident in incidents)
    losses = _applied_losses(run)
    last_step = _last_step(run)
    health = _health(ending, incidents, rows)
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
    return _with_headline(story)


def _ended_before(incident: IncidentStory) -> IncidentStory:
    """What is not known yet will never be."""
    return replace(incident, outcome=UNKNOWN_OUTCOME) if incident.outcome == NOT_KNOWN else incident


def _with_headline(story: RunStory) -> RunStory:
    parts = [f"{story.ended} at step {story.last_step:,}" if story.last_step is not None else story.ended]
    done = [i for i in story.incidents if i.level not in (IncidentLevel.REPORTED, IncidentLevel.SUSPECTED)]
    if story.main is not None:
        count = "1 incident" if len(done) == 1 else f"{len(done)} incidents"
        which = "" if len(done) == 1 else ("the last: " if story.main is done[-1] else "the first: ")
        parts.append(f"{count} ({which}{story.main.cause_text} at step {story.main.step:,})")
    if story.last_loss is not None:
        parts.append(f"loss {story.last_loss:.4g}")
    return replace(story, headline=f"{story.verdict.upper()}  {'; '.join(parts)}")


# -- how it ended


def _ending(events: Sequence[EventFields], alive: bool | None) -> tuple[RunVerdict, str]:
    """Whether the run goes on, and how it has ended, in words; HEALTHY stands for an end without an error."""
    start = max((k for k, event in enumerate(events) if event.get("name") == "attached"), default=0)
    since = events[start:]
    stop = [e for e in since if e.get("action") == Action.STOP and e.get("kind") == "decision" and e.get("applied")]
    error = next((e for e in since if e.get("name") == "exception"), None)
    closed = any(e.get("name") == "closed" for e in since)
    if stop:
        return RunVerdict.FAILED, f"surefoot stopped the run: {str(stop[-1].get('reason') or '').rstrip('.')};"
    if error is not None:
        return RunVerdict.FAILED, f"ended in an error: {error.get('detail')};"
    if closed:
        return RunVerdict.HEALTHY, "ended"
    if alive:
        return RunVerdict.RUNNING, "running,"
    return RunVerdict.KILLED, "its process ended without closing the run,"


def _health(ending: RunVerdict, incidents: Sequence[IncidentStory], rows: RowFacts) -> RunVerdict:
    if ending is RunVerdict.FAILED:
        return RunVerdict.FAILED
    done = [i for i in incidents if i.level in (IncidentLevel.REFUSED, IncidentLevel.ACTED, IncidentLevel.STOPPED)]
    if not done:
        return RunVerdict.HEALTHY
    last = max(done, key=lambda incident: incident.attempt)
    ended_refused = bool(rows.verdicts) and rows.verdicts[-1] in (Verdict.NONFINITE, Verdict.NORM_OUTLIER)
    unresolved = last.helped is False or (last.helped is None and ended_refused)
    return RunVerdict.FAILED if unresolved and ending is not RunVerdict.RUNNING else RunVerdict.WARNING


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
