"""Cases from a folder of runs or from a library file, and the library file itself: one case a line."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from surefoot.cases.case_record import Case, InvalidCase, case_from_json, text
from surefoot.cases.read_run_cases import MAX_EVENT_BYTES, UnreadableRun, run_cases, run_name
from surefoot.journal.row_file import write_atomically
from surefoot.journal.run_json import RUN_JSON, SIGNALS_DIR
from surefoot.journal.strict_json import dumps, loads_object

MAX_LIBRARY_BYTES = 1 << 26
MAX_LINES = 100_000
MAX_DEPTH, MAX_FOLDERS = 6, 20_000
"""How deep below the folder runs are looked for, and in how many folders at most."""
MAX_NOTES = 50
FAST_BYTES = 1 << 24
"""Bytes of events above which a run is left out where time is bounded."""
_RUN_FILES = frozenset({RUN_JSON, SIGNALS_DIR, "events.jsonl"})


class NoCases(ValueError):
    """There is no such folder or library; the message says what to pass."""


@dataclass(frozen=True, slots=True)
class CaseLibrary:
    """Cases that were read, and what could not be."""

    cases: list[Case] = field(default_factory=list)
    num_runs: int = 0
    """Run directories that were read; 0 for a library file."""
    notes: list[str] = field(default_factory=list)
    """One line for each run or line that could not be read."""


def load_cases(path: Path, *, seconds: float | None = None, skip: Path | None = None) -> CaseLibrary:
    """Read a library file, or all runs below a folder, the newest first where `seconds` bound it; raises NoCases.

    The run directory `skip` is left out.
    """
    if path.is_file():
        return _read_library(path)
    if not path.is_dir():
        raise NoCases(f"{path} does not exist. Pass a folder with runs, or a case library that --export has written")
    library, deadline = CaseLibrary(), None if seconds is None else time.monotonic() + seconds
    runs = list(_find_runs(path, library.notes, deadline))
    if deadline is not None:
        runs.sort(key=_changed_at, reverse=True)
    num_read = 0
    for run in runs:
        if deadline is not None and time.monotonic() > deadline:
            library.notes.append(f"{len(runs) - num_read} of {len(runs)} runs were not read: {seconds:g} s were over")
            break
        num_read += 1
        if skip is not None and _same(run, skip):
            continue
        name = run_name(run, path)
        try:
            library.cases.extend(
                run_cases(run, name, max_event_bytes=MAX_EVENT_BYTES if seconds is None else FAST_BYTES)
            )
        except UnreadableRun as error:
            library.notes.append(text(f"{name} is left out: {error}", 300))
    return CaseLibrary(library.cases, num_read, library.notes[:MAX_NOTES])


def write_library(path: Path, cases: Sequence[Case]) -> None:
    """Write one case a line, so that libraries can be joined with `cat`."""
    write_atomically(path, *(dumps(case.as_json()).encode("ascii") + b"\n" for case in cases))


def _read_library(path: Path) -> CaseLibrary:
    if path.stat().st_size > MAX_LIBRARY_BYTES:
        raise NoCases(f"{path} is larger than {MAX_LIBRARY_BYTES >> 20} MiB. Split it")
    cases: list[Case] = []
    notes: list[str] = []
    torn = ""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if number > MAX_LINES:
                notes.append(f"lines from {MAX_LINES + 1:,} on are left out")
                break
            if not line.strip():
                continue
            values = loads_object(line)
            if values is None:
                torn = f"line {number} is left out: it is not a JSON object"
                if line.endswith(b"\n"):  # a torn last line of a library is ignored
                    notes.append(torn)
                continue
            try:
                cases.append(case_from_json(values))
            except InvalidCase as error:
                notes.append(f"line {number} is left out: {error}")
    problem = next(iter(notes), torn)
    if problem and not cases:
        raise NoCases(
            f"{path} is no case library: {problem}. Write one with: surefoot cases FOLDER --export FILE.jsonl"
        )
    return CaseLibrary(cases, 0, notes[:MAX_NOTES])


def _find_runs(folder: Path, notes: list[str], deadline: float | None) -> Iterator[Path]:
    """Run directories below a folder, in order of their names; links are not followed."""
    waiting, visited = [(folder, 0)], 0
    while waiting:
        path, depth = waiting.pop()
        visited += 1
        late = deadline is not None and time.monotonic() > deadline
        if visited > MAX_FOLDERS or late:
            notes.append(f"only the first {visited - 1:,} folders were searched. Pass a folder closer to the runs")
            return
        try:
            with os.scandir(path) as scan:
                entries = sorted(scan, key=lambda entry: entry.name)
        except OSError as error:
            notes.append(text(f"{run_name(path, folder)} cannot be opened: {error.strerror}", 300))
            continue
        if _RUN_FILES & {entry.name for entry in entries}:
            yield path
        elif depth < MAX_DEPTH:
            below = [Path(e.path) for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith(".")]
            waiting += [(child, depth + 1) for child in reversed(below)]


def _changed_at(run: Path) -> float:
    try:
        return (run / RUN_JSON).stat().st_mtime
    except OSError:
        return 0.0


def _same(one: Path, other: Path) -> bool:
    return one.resolve() == other.resolve()
