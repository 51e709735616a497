"""Run by torchrun with two ranks and a restart: the second rank is killed once.

The results are whether the killed run is bit-identical to an uninterrupted one, and the losses of runs with every
parallel strategy.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from small_runs import newest_tensors, same, small_recipe

import surefoot
from surefoot.cli.train import show
from surefoot.train import exit_codes

RUNS: dict[str, dict[str, Any]] = {
    "data": {"parallel": {"strategy": "data"}},
    "zero1": {"parallel": {"strategy": "zero1"}},
    "zero2": {"parallel": {"strategy": "zero2"}},
    "zero3": {"parallel": {"strategy": "zero3"}},
    "data float16": {"parallel": {"strategy": "data"}, "precision": {"compute": "float16"}},
    "zero3 bfloat16": {"parallel": {"strategy": "zero3"}, "precision": {"compute": "bfloat16"}},
}
EIGHT_PER_UPDATE = {"batch": {"size": 2, "accumulate": 2}, "steps": None, "epochs": 3, "checkpoints": {"every": 100}}
"""Eight samples per update, as in a single process with a batch of 8."""


def main(out: Path) -> None:
    killed = {"factory": "custom_parts:failing", "at": 16, "how": "kill", "folder": str(out / "killed")}
    steps = {"batch": {"size": 2, "accumulate": 2}, "steps": 14, "checkpoints": {"every": 4}}
    _train(out / "killed", **steps, loss=killed)
    _train(out / "uninterrupted", **steps)
    for name, sections in RUNS.items():
        _train(out / name, **EIGHT_PER_UPDATE, **sections)
    rank = int(os.environ["RANK"])  # only rank 0 reads the results, after it has written them
    (out / f"results-{rank}.json").write_text(json.dumps(_results(out) if rank == 0 else {}))


def _results(out: Path) -> dict[str, Any]:
    events = surefoot.read(out / "killed" / "run").events
    return {
        "killed": (out / "killed" / "killed").exists(),
        "resumed": any(event.get("name") == "resumed" for event in events),
        "same": same(newest_tensors(out / "killed" / "run"), newest_tensors(out / "uninterrupted" / "run")),
        **{name: surefoot.read(out / name / "run").scalars["loss"].tolist() for name in RUNS},
    }


def _train(folder: Path, **sections: Any) -> None:
    """Train; exit when stopped because the other rank was killed, to be restarted with it."""
    code = show(small_recipe(folder, **sections), ())
    if code != exit_codes.DONE:
        sys.exit(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
