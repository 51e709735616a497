"""Finds run directories below a folder, newest first."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from surefoot.journal.run_json import RUN_JSON, SIGNALS_DIR

_MAX_DEPTH = 5
_MAX_FOLDERS = 20_000
_SKIPPED = {"node_modules", "__pycache__", "checkpoints", "incidents", SIGNALS_DIR}


class NoRunFound(ValueError):
    """There is no run to watch; the message says where was looked and what to do."""


@dataclass(frozen=True, slots=True)
class FoundRun:
    """A run directory and when it was last written to."""

    path: Path
    changed: float

    def name_in(self, folder: Path) -> str:
        """Its path below the folder it was found in."""
        try:
            return str(self.path.relative_to(folder)) if self.path != folder else self.path.name
        except ValueError:
            return str(self.path)


@dataclass(frozen=True, slots=True)
class WatchTarget:
    """What the user asked for: the run to show first, and all runs there are to choose from."""

    folder: Path
    runs: tuple[FoundRun, ...]
    """Newest first."""
    first: FoundRun


def is_run(path: Path) -> bool:
    return (path / RUN_JSON).is_file() or (path / SIGNALS_DIR).is_dir() or (path / "events.jsonl").is_file()


def find_runs(folder: Path) -> list[FoundRun]:
    """All runs in a folder and below it, newest first."""
    found: list[FoundRun] = []
    for seen, (where, folders, _) in enumerate(os.walk(folder)):
        path = Path(where)
        depth = len(path.relative_to(folder).parts)
        if is_run(path):
            found.append(FoundRun(path, last_change(path)))
        if depth >= _MAX_DEPTH or seen > _MAX_FOLDERS:
            folders[:] = []
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _SKIPPED)
    return sorted(found, key=lambda run: (-run.changed, run.path))


def choose_target(path: Path | None) -> WatchTarget:
    """The run at `path`, or the newest below it; raises NoRunFound."""
    folder = Path() if path is None else path
    if not folder.exists():
        raise NoRunFound(f"{folder} does not exist. Name a run directory, or a folder with runs below it")
    if not folder.is_dir():
        raise NoRunFound(
            f"{folder} is a file. Name a run directory; for a log use: surefoot diagnose --follow {folder}"
        )
    folder = folder.resolve()
    runs = find_runs(folder)
    if not runs:
        raise NoRunFound(
            f"there is no run in {folder} or below it. Pass the run_dir that was given to surefoot.attach, "
            f"or start one: surefoot demo"
        )
    own = next((run for run in runs if run.path == folder), None)
    if own is not None and path is not None:
        siblings = [run for run in find_runs(folder.parent) if run.path.parent == folder.parent]
        return WatchTarget(folder.parent, tuple(siblings) or (own,), own)
    return WatchTarget(folder, tuple(runs), own or runs[0])


def last_change(run: Path) -> float:
    """When the run last wrote a row or an event; 0 if it has vanished."""
    names = ("writer.lock", "events.jsonl", RUN_JSON, f"{SIGNALS_DIR}/scalars-000000.bin")
    return max((_changed(run / name) for name in names), default=0.0)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
