"""Small recorded runs whose decisions a replay must make again: `python -m benchmarks.golden FOLDER`.

Made anew whenever decisions are meant to change; the difference then shows in the events of each run.
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
from surefoot.journal.run_json import RUN, SIGNALS, events_name

SCENARIOS = (
    "bad_batch-plain-subtle-11",
    "gradient_nan-recurrent-clear-11",
    "rate_too_high-decoder-brutal-11",
    "bit_flip-recurrent-clear-11",
    "loss_scale_collapse-plain-clear-11",
    "spike_that_heals-recurrent-11",
)
"""A little of everything: refusals, rewinds, restraints, loss scaling, and a healthy run that only looks suspicious."""


def make(name: str, folder: Path) -> int:
    """Record one run of the zoo under protection and keep what a replay needs; returns how much was decided."""
    with tempfile.TemporaryDirectory() as home:
        made = Path(home, name)
        train(all_scenarios()[name].run(), SurefootProtector(made, observe=False))
        _keep(made, folder / name)
    found = replay(folder / name)
    if found.differences:
        raise RuntimeError(f"{name}: the decisions of a run just made are not made again: {found.differences[0]}")
    return len(found.recorded)


def _keep(made: Path, kept: Path) -> None:
    kept.mkdir(parents=True)
    info = json.loads((made / RUN).read_text())
    config = {name: info["config"][name] for name in ("policy", "judged")}
    told = {"schema": info["schema"], "surefoot": info["surefoot"], "config": config, "earlier": []}
    (kept / RUN).write_text(json.dumps(told, indent=1) + "\n")
    lines = (made / events_name(0)).read_text().splitlines(keepends=True)
    (kept / events_name(0)).write_text("".join(line for line in lines if _needed(line)))
    shutil.copytree(made / SIGNALS, kept / SIGNALS)


def _needed(line: str) -> bool:
    event = json.loads(line)
    return event["kind"] == "decision" or event.get("name") in NOTES


def main(words: Sequence[str]) -> int:
    if len(words) != 1:
        print("usage: python -m benchmarks.golden FOLDER", file=sys.stderr)
        return 2
    folder = Path(words[0])
    torch.set_num_threads(1)
    logging.getLogger("surefoot").setLevel(logging.CRITICAL)
    for old in folder.glob(f"*/{RUN}"):
        shutil.rmtree(old.parent)
    for name in SCENARIOS:
        print(f"{name}: {make(name, folder)} decisions", flush=True)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{size / 1e6:.2f} MB in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
