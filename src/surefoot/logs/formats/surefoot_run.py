"""Reads a surefoot run directory: the metrics of every attempted update, and its diagnoses and decisions."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.journal import reader
from surefoot.journal.run_json import RUN_JSON, SIGNALS_DIR
from surefoot.journal.strict_json import loads_object
from surefoot.logs.log_diagnosis import UnreadableInput
from surefoot.logs.table import LogTable, TableBuilder
from surefoot.records import FindingKind, Verdict

FORMAT = "run"
_COLUMN_NAMES = {"norm": "grad_norm"}
_SKIPPED_COLUMNS = frozenset(
    {"verdict", "optimizer", "bad_microbatch", "num_microbatches", "rank", "loss_d1", "loss_d2"}
)
_MAX_EVENT_NOTES = 12
_NOTED_KINDS = ("diagnosis", "decision", "incident")


def is_run_dir(path: str | os.PathLike[str]) -> bool:
    """Whether a folder is a run directory."""
    folder = Path(path)
    try:
        if (folder / SIGNALS_DIR).is_dir() and any((folder / SIGNALS_DIR).glob("scalars*")):
            return True
        file = folder / RUN_JSON
        return file.is_file() and "surefoot" in (loads_object(file.read_bytes()[: 1 << 20]) or {})
    except OSError:
        return False


def run_dir_of(file: str) -> Path | None:
    """The run directory a file belongs to, or None."""
    path = Path(file)
    if path.name == RUN_JSON or (path.name.startswith("events") and path.suffix == ".jsonl"):
        return path.parent if is_run_dir(path.parent) else None
    return path.parent.parent if path.parent.name == SIGNALS_DIR and is_run_dir(path.parent.parent) else None


def read_run_dir(path: str | os.PathLike[str]) -> LogTable:
    """Read the rows of a run; diagnoses and decisions become notes and settings."""
    try:
        run = reader.read(path)
    except (OSError, ValueError) as error:
        raise UnreadableInput(str(error)) from None
    builder = TableBuilder()
    for note in run.notes:
        builder.note(note)
    if run.skipped:
        builder.skip("events that could not be parsed", run.skipped)
    if run.scalars.rows:
        _add_rows(run.scalars, builder)
    elif not run.events:
        raise UnreadableInput(f"{path} is a run directory in which nothing was recorded yet")
    _note_events(run.events, builder)
    for name in ("model", "optimizer", "policy", "clip"):
        value = run.info.get(name)
        if isinstance(value, str) and len(value) < 200:
            builder.settings[name] = value
        elif isinstance(value, int | float):
            builder.settings[name] = float(value)
    return replace(builder.build(FORMAT, str(path)), story=run.story)


def _add_rows(scalars: reader.Scalars, builder: TableBuilder) -> None:
    verdicts = np.asarray(scalars["verdict"]) if "verdict" in scalars else np.zeros(scalars.rows)
    first_optimizer = (
        np.asarray(scalars["optimizer"]) == 0 if "optimizer" in scalars else np.ones(scalars.rows, np.bool_)
    )
    verdicts = verdicts[first_optimizer]
    broken = verdicts == Verdict.NONFINITE
    rows = np.arange(len(verdicts), dtype=np.int64)
    for name in scalars:
        if name in _SKIPPED_COLUMNS:
            continue
        values = np.asarray(scalars[name])[first_optimizer].astype(np.float64)
        # NaN means "unknown" in a row, unless the update was vetoed as non-finite.
        known = ~np.isnan(values) | (broken & (name in ("loss", "norm")))
        if not np.isnan(values).all() or (name == "loss" and known.any()):
            builder.add_values(_COLUMN_NAMES.get(name, name), rows[known], values[known])
    builder.records = len(rows)
    skipped = verdicts == Verdict.OVERFLOW
    if skipped.any():
        builder.add_values("skipped", rows, np.cumsum(skipped).astype(np.float64))
    refused = int((broken | (verdicts == Verdict.NORM_OUTLIER)).sum())
    if refused:
        builder.settings["refused"] = float(refused)
        updates = "1 update was" if refused == 1 else f"{refused:,} updates were"
        builder.note(f"{updates} refused before reaching the weights")


def _note_events(events: list[dict[str, Any]], builder: TableBuilder) -> None:
    noted = [e for e in events if e.get("kind") in _NOTED_KINDS or _is_noted(e)]
    diagnosed: list[str] = []
    decided: list[str] = []
    for event in noted:
        step = event.get("step")
        if event["kind"] == "diagnosis":
            diagnosed.append(f"{event.get('cause', 'unknown')}@{step}")
        elif event["kind"] == "decision":
            decided.append(f"{event.get('action', 'unknown')}@{step}")
    for line in [_describe_event(event) for event in noted][:_MAX_EVENT_NOTES]:
        builder.note(line)
    if len(noted) > _MAX_EVENT_NOTES:
        builder.note(f"and {len(noted) - _MAX_EVENT_NOTES} more diagnoses and decisions, in the events of the run")
    # The last ones: how the run ended.
    if diagnosed:
        builder.settings["diagnosed"] = " ".join(diagnosed[-20:])
    if decided:
        builder.settings["decided"] = " ".join(decided[-20:])


def _is_noted(event: dict[str, Any]) -> bool:
    """Where a value came from, and what was banned for it."""
    banned = event.get("kind") == "note" and event.get("name") == "banned"
    return banned or event.get("detector") == FindingKind.ORIGIN


def _describe_event(event: dict[str, Any]) -> str:
    step, kind = event.get("step"), event["kind"]
    if kind == "diagnosis":
        sure = event.get("confidence")
        share = f" ({sure:.0%} confidence)".replace("%", " %") if isinstance(sure, float) else ""
        return (
            f"step {step}: diagnosed during the run as {event.get('cause')}{share}. {event.get('detail', '')}".strip()
        )
    if kind == "decision":
        done = "" if event.get("applied", True) else " (not applied, observe only)"
        return f"step {step}: {event.get('action')}{done}, because {event.get('reason', 'no reason is recorded')}"
    if kind == "note":
        return f"step {step}: {event.get('detail', '')}"
    if kind == "finding":
        return f"step {step}, rank {event.get('rank', 0)}: {event.get('detail', '')}"
    return f"step {step}: {kind} {event.get('name', '')} {event.get('detail', '')}".strip()
