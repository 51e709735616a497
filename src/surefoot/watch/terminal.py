"""The loop of `surefoot watch` in a terminal, and its output for files and programs."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.live import Live

from surefoot.journal.strict_json import plain
from surefoot.logs.report.terminal_plot import shows_braille
from surefoot.watch.find_runs import FoundRun, WatchTarget, find_runs
from surefoot.watch.key_presses import key_mode, press, read_keys
from surefoot.watch.live_run import LiveRun
from surefoot.watch.run_verdict import TROUBLE, incidents_json
from surefoot.watch.screen import ScreenView, render, snapshot

REFRESH_SECONDS = 1.0
_KEY_SECONDS = 0.2
_LIST_SECONDS = 15.0
_LAST_EVENTS = 50


def watch_terminal(target: WatchTarget) -> int:
    """Show the run until q is pressed; returns the exit code."""
    console = Console(highlight=False)
    unicode = shows_braille(sys.stdout.encoding)
    run, runs, view = LiveRun(target.first.path), list(target.runs), ScreenView()
    read_at = listed_at = time.monotonic()
    shown: object = None
    with key_mode(), Live(console=console, screen=True, auto_refresh=False, redirect_stderr=False) as live:
        while True:
            size = console.size
            state = (run.path, run.version, view, size, len(runs), int(time.monotonic() / 10))
            if state != shown:
                screen = render(run, view, runs, width=size.width - 1, height=size.height, unicode=unicode)
                live.update(screen, refresh=True)
                shown = state
            for key in read_keys(_KEY_SECONDS):
                result = press(key, view, runs=len(runs))
                view = result.view
                if result.quit:
                    return exit_code(run)
                if result.open_run and runs:
                    run = LiveRun(runs[view.selected].path)
            now = time.monotonic()
            if now - read_at >= REFRESH_SECONDS:
                run.refresh()
                read_at = time.monotonic()
            if view.panel == "runs" and now - listed_at >= _LIST_SECONDS:
                runs, listed_at = _listed_again(target, runs), now


def _listed_again(target: WatchTarget, runs: list[FoundRun]) -> list[FoundRun]:
    known = {run.path for run in runs}
    return [*runs, *(run for run in find_runs(target.folder) if run.path not in known)]


def print_once(target: WatchTarget) -> int:
    """Print one snapshot, and the other runs there are."""
    run = LiveRun(target.first.path)
    console = Console(highlight=False, soft_wrap=True)
    unicode = shows_braille(sys.stdout.encoding)
    console.print(snapshot(run, width=min(console.width, 160), unicode=unicode))
    others = [found.name_in(target.folder) for found in target.runs if found.path != run.path]
    if others:
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        console.print(f"other runs in {target.folder}: {', '.join(others[:5])}{more}", markup=False)
    return exit_code(run)


def print_json(target: WatchTarget) -> int:
    """Print one JSON object for a program."""
    run = LiveRun(target.first.path)
    print(json.dumps(as_json(run) | {"runs": [str(found.path) for found in target.runs]}, indent=1))
    return exit_code(run)


def as_json(run: LiveRun) -> dict[str, Any]:
    """The run as one object: state, verdict, numbers, incidents and the last events."""
    return {
        "run": str(run.path),
        "state": run.state.state.value,
        "state_detail": run.state.detail,
        "verdict": run.verdict.verdict.value,
        "health": run.verdict.health.value,
        "sentence": run.verdict.sentence,
        "numbers": run.numbers.as_json(),
        **plain(incidents_json(run.verdict)),
        "events": [plain(asdict(line)) for line in run.lines[-_LAST_EVENTS:]],
    }


def exit_code(run: LiveRun) -> int:
    """1 unless the run is healthy, or nothing is known yet."""
    return 1 if run.verdict.verdict in TROUBLE else 0
