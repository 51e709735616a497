"""Records the golden runs whose decisions a replay must reproduce: `python -m benchmarks.golden FOLDER`.

Regenerate them when decisions are meant to change, and review the difference in each run's events.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.recorded_run import NOTES
from benchmarks.replay import replay
from benchmarks.zoo.attached import SurefootProtector
from benchmarks.zoo.jobs import all_scenarios
from benchmarks.zoo.training import train
from surefoot.journal.run_json import RUN_JSON, SIGNALS_DIR, events_filename

SCENARIOS = (
    "bad_batch-plain-subtle-11",
    "gradient_nan-recurrent-clear-11",
    "rate_too_high-decoder-brutal-11",
    "bit_flip-recurrent-clear-11",
    "loss_scale_collapse-plain-clear-11",
    "spike_that_heals-recurrent-11",
)
"""Refusals, rewinds, overrides, loss scaling, and a healthy run that only looks suspicious."""


def make(name: str, folder: Path) -> int:
    """Record one zoo run under protection and store what a replay needs; returns the number of decisions."""
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch, name)
        train(all_scenarios()[name].run(), SurefootProtector(run_dir, observe=False))
        _store(run_dir, folder / name)
    result = replay(folder / name)
    if result.differences:
        raise RuntimeError(f"{name}: replaying the new recording gives another decision: {result.differences[0]}")
    return len(result.recorded)


def _store(run_dir: Path, target: Path) -> None:
    target.mkdir(parents=True)
    info = json.loads((run_dir / RUN_JSON).read_text())
    config = {name: info["config"][name] for name in ("policy", "judged")}
    reduced = {"schema": info["schema"], "surefoot": info["surefoot"], "config": config, "earlier": []}
    (target / RUN_JSON).write_text(json.dumps(reduced, indent=1) + "\n")
    lines = (run_dir / events_filename(0)).read_text().splitlines(keepends=True)
    (target / events_filename(0)).write_text("".join(line for line in lines if _needed(line)))
    shutil.copytree(run_dir / SIGNALS_DIR, target / SIGNALS_DIR)


def _needed(line: str) -> bool:
    event = json.loads(line)
    return event["kind"] == "decision" or event.get("name") in NOTES


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1:
        print("usage: python -m benchmarks.golden FOLDER", file=sys.stderr)
        return 2
    folder = Path(arguments[0])
    torch.set_num_threads(1)
    logging.getLogger("surefoot").setLevel(logging.CRITICAL)
    for old in folder.glob(f"*/{RUN_JSON}"):
        shutil.rmtree(old.parent)
    for name in SCENARIOS:
        print(f"{name}: {make(name, folder)} decisions", flush=True)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{size / 1e6:.2f} MB in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
