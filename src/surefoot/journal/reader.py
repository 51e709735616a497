"""Reads a run directory, whether live, finished, killed or damaged; never writes."""

from __future__ import annotations

import functools
import heapq
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from surefoot.journal.aliases import upgraded_columns, upgraded_event
from surefoot.journal.columns import Layers, Scalars
from surefoot.journal.event_order import EventKey, EventOrder
from surefoot.journal.incident_folders import IncidentBundle, read_incidents
from surefoot.journal.row_file import BadHeader, EmptyFile, RowHeader, file_size, map_rows
from surefoot.journal.run_json import RUN_JSON, SIGNALS_DIR
from surefoot.journal.segments import list_segments
from surefoot.journal.strict_json import loads_object
from surefoot.records import SCHEMA

if TYPE_CHECKING:
    from surefoot.story.run_story import RunStory

_EVENTS = re.compile(r"events(?:-rank(\d+))?\.jsonl")
_ATTEMPTS = 10


@dataclass(frozen=True, repr=False, eq=False)
class Run:
    """The contents of a run directory when it was read; read it again to follow a live run."""

    path: Path
    info: dict[str, Any]
    """The content of `run.json`; empty if there is none."""
    scalars: Scalars
    """`scalars["loss"]`: one NumPy array per field of `StepMetrics`."""
    layers: Layers
    """`layers["block.0.weight"]["norm"]`, with `layers.steps` and `layers.attempts` for its rows."""
    events: list[dict[str, Any]]
    """Events of all ranks in order of attempts, each with kind, step, attempt, rank, time and its own fields."""
    skipped: int
    """Event lines that could not be parsed: torn by a kill or a full disk."""
    notes: list[str]
    """Files that are missing or damaged, one sentence each."""

    @functools.cached_property
    def incidents(self) -> list[IncidentBundle]:
        """The incident bundles, in order of steps; each with `path`, `step`, `kind` and `info`."""
        return list(read_incidents(self.path, self.notes))

    @functools.cached_property
    def story(self) -> RunStory:
        """What happened, as data: the verdict, and each incident with its cause, what was done, and whether it helped;
        the console, `surefoot diagnose` and `surefoot report` say the same."""
        from surefoot.story.read_story import tell_run

        return tell_run(self)

    def __repr__(self) -> str:
        parts = [f"{self.scalars.rows} rows"]
        if self.scalars.rows:
            parts.append(f"last step {self.scalars['step'][-1]}")
        parts.append(f"{len(self.events)} events")
        if self.layers.rows:
            parts.append(f"{len(self.layers)} tensors in {self.layers.rows} rows")
        if self.skipped:
            parts.append(f"{self.skipped} lines skipped")
        return f"Run({str(self.path)!r}, {', '.join([*parts, *self.notes])})"


def read(run_dir: str | os.PathLike[str]) -> Run:
    """Read a run directory; raises ValueError if `run_dir` is not one."""
    path = Path(run_dir)
    _check_run_dir(path)
    notes: list[str] = []
    scalars = [upgraded_columns(rows) for _, rows in _signals(path / SIGNALS_DIR, "scalars", notes)]
    layers = _signals(path / SIGNALS_DIR, "layers", notes)
    events, skipped = _events(path)
    info = _info(path / RUN_JSON, notes)
    return Run(path, info, Scalars(scalars), Layers(layers), events, skipped, notes)


def _check_run_dir(path: Path) -> None:
    if not path.is_dir():
        raise ValueError(f"{path} {'is a file' if path.exists() else 'does not exist'}; expected a run directory")
    names = {entry.name for entry in path.iterdir()}
    if not names & {RUN_JSON, SIGNALS_DIR} and not any(_EVENTS.fullmatch(name) for name in names):
        raise ValueError(
            f"{path} is not a run directory: it has no {RUN_JSON}, no events and no {SIGNALS_DIR}."
            f" Pass the run_dir that was given to surefoot.attach"
        )


def _info(path: Path, notes: list[str]) -> dict[str, Any]:
    info = loads_object(path.read_bytes()) if file_size(path) else None
    if info is None:
        notes.append(f"{path.name} is {'unreadable' if path.exists() else 'missing'}")
        return {}
    schema = info.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        notes.append(f"written by a newer surefoot (schema {schema}; this version reads up to {SCHEMA})")
    return info


def _signals(folder: Path, kind: str, notes: list[str]) -> list[tuple[RowHeader, np.ndarray]]:
    """The mapped rows of every file of a kind, oldest first.

    A live writer may merge files or be writing a header meanwhile: read again if the list of files has changed, or if a
    file has a problem for the first time.
    """
    segments: list[tuple[RowHeader, np.ndarray]] = []
    problems: list[str] = []
    for _ in range(_ATTEMPTS):
        files = list_segments(folder, kind)
        previous, segments, problems = problems, [], []
        for file in reversed(files):  # newest first; old ones may be thinned meanwhile
            try:
                header, rows = map_rows(file.path)
                if header.kind != kind:
                    raise BadHeader(f"holds {header.kind}")
                segments.append((header, rows))
            except FileNotFoundError:
                problems.append(f"{file.path.name} vanished")
            except EmptyFile:
                pass  # no row is missing
            except (BadHeader, OSError) as error:
                problems.append(f"{file.path.name} ignored: {error}")
        if problems == previous and list_segments(folder, kind)[: len(files)] == files:
            break
    notes += reversed(problems)
    return segments[::-1]


def _events(path: Path) -> tuple[list[dict[str, Any]], int]:
    files: list[list[tuple[EventKey, dict[str, Any]]]] = []
    skipped = 0
    for file in path.iterdir():
        match = _EVENTS.fullmatch(file.name)
        if match and file_size(file):
            rank = int(match[1] or 0)
            lines = [line for line in file.read_bytes().split(b"\n") if line.strip()]
            parsed = [event for event in map(loads_object, lines) if event is not None]
            skipped += len(lines) - len(parsed)
            files.append(list(_keyed(parsed, rank)))
    return [event for _, event in heapq.merge(*files, key=lambda pair: pair[0])], skipped


def _keyed(events: list[dict[str, Any]], rank: int) -> Iterator[tuple[EventKey, dict[str, Any]]]:
    """Events of one file with their sort keys."""
    order = EventOrder(rank)
    for event in events:
        event = upgraded_event({"kind": "note", "step": -1, "attempt": -1, "rank": rank, "time": 0.0} | event)
        yield order.key(event), event
