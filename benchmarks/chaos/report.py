"""Prints and writes the results of the chaos benchmark: a table, JSON, and docs/chaos.md."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.chaos import main
from benchmarks.chaos.trials import FaultTally
from surefoot.journal.output_files import check_output, output_file


def show(*, only: str, quick: bool, times: int | None, seed: int, page: Path | None, as_json: bool) -> int:
    """Try the faults and print the table; 1 when a run was lost."""
    try:
        if page is not None:
            check_output(page / "chaos.md", force=None)
        tallies = main(only=only, quick=quick, times=times, seed=seed, say=lambda line: print(line, file=sys.stderr))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print(json.dumps(as_data(tallies), indent=1) if as_json else table(tallies))
    if page is not None:
        options = [f"--only {only}"] if only else []
        options += ["--quick"] * quick + ([] if times is None else [f"--times {times}"])
        print(f"written: {write(tallies, page, ' '.join(['surefoot bench chaos', *options]))}", file=sys.stderr)
    return 1 if any(tally.lost for tally in tallies) else 0


def table(tallies: Sequence[FaultTally]) -> str:
    rows = ["| fault | passes when | tried | survived | lost |", "|---|---|---:|---:|---:|"]
    rows += [f"| {t.fault} | {t.passes} | {t.tried:,} | {t.survived:,} | {len(t.lost)} |" for t in tallies]
    return "\n".join(rows)


def as_data(tallies: Sequence[FaultTally]) -> list[dict[str, Any]]:
    return [asdict(t) | {"survived": t.survived} for t in tallies]


def write(tallies: Sequence[FaultTally], folder: Path, command: str) -> Path:
    """Write chaos.md to this folder."""
    machine = (
        f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}"
    )
    notes = [note for t in tallies for note in t.notes]
    lost = ["lost: " + re.sub(r", /\S+?(?=:)", "", failure) for t in tallies for failure in t.lost]
    bullets = "\n".join(f"- {line}" for line in (*notes, *lost))
    page = folder / "chaos.md"
    folder.mkdir(parents=True, exist_ok=True)
    with output_file(page, force=None) as draft:
        head = _HEAD.format(command=command, machine=machine)
        draft.write_text(f"{head}\n{table(tallies)}\n{_MEANING}\n{bullets}\n")
    return page


_HEAD = """# Chaos

Written by `{command}` ({machine}); every number below was measured.

Each trial is a real process that trains a small net with dropout, batch norm, AdamW, an lr schedule and surefoot's
loader, attached with `resume=True`, and logs every loss. It is compared bit for bit with an uninterrupted run without
checkpoints: every loss, including those of steps done twice, and at the end the weights, optimizer state, schedule,
loss scale, random state and data position.
"""
_MEANING = """
An *interval* is `save_every` updates, plus the updates made while a save was being written (training does not wait for
it), plus 5 until their metrics are read back. A run is *lost* when it could not resume, resumed to other numbers than
the uninterrupted run, or lost more than one interval. Disk faults are injected below the checkpoint store, and a disk
that hangs is given up after 1 s instead of 300 s. Corruption is tested on the store in every trial, and once on a whole
run. A process still alive after a signal's grace time is killed.
"""
