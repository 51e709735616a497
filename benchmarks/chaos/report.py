"""What came of it, as a table and as the page of the documentation."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.chaos.trials import Tally
from surefoot.journal.output_files import output_file


def table(tallies: Sequence[Tally]) -> str:
    rows = ["| fault | passes when | tried | survived | lost |", "|---|---|---:|---:|---:|"]
    rows += [f"| {t.fault} | {t.passes} | {t.tried:,} | {t.survived:,} | {len(t.lost)} |" for t in tallies]
    return "\n".join(rows)


def as_data(tallies: Sequence[Tally]) -> list[dict[str, Any]]:
    return [asdict(t) | {"survived": t.survived} for t in tallies]


def write(tallies: Sequence[Tally], folder: Path, command: str) -> Path:
    """The page `chaos.md` in this folder."""
    machine = (
        f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, Python {platform.python_version()}"
    )
    notes = [note for t in tallies for note in t.notes]
    lost = ["lost: " + re.sub(r", /\S+?(?=:)", "", one) for t in tallies for one in t.lost]
    listed = "\n".join(f"- {line}" for line in (*notes, *lost))
    page = folder / "chaos.md"
    folder.mkdir(parents=True, exist_ok=True)
    with output_file(page, force=None) as draft:
        head = _HEAD.format(command=command, machine=machine)
        draft.write_text(f"{head}\n{table(tallies)}\n{_MEANING}\n{listed}\n")
    return page


_HEAD = """# Chaos

Written by `{command}` ({machine}); what is below was done, not claimed.

Each victim is a real process that trains a small net with dropout, batch norm, AdamW, a schedule and a loader of ours,
attached with `resume=True`, and writes down every loss as it comes. It is compared, bit for bit, with a run without
checkpoints to which nothing happens: every loss, also of steps that were done twice, and at the end weights, optimizer,
schedule, loss scale, random numbers and the place in the data.
"""
_MEANING = """
An *interval* is `save_every` updates, those that passed while a save was under way (the training does not wait for it),
and 5 until their numbers are known. A run that is *lost* could not go on, went on otherwise than the one to which
nothing happened, or lost more than an interval. Faults of the disk are stand-ins below the store, and a disk that hangs
is given up after 1 s in place of 300. Damage is shown to the store, and once to a whole run. What still runs after the
grace time of a signal is killed.
"""
