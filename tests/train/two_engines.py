"""Run by torchrun with two processes, which is to start them again: the second of them is killed once.

Told is whether the run that was killed ends with the bits of one that was not, and the losses of runs in which the
model is spread in every way.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from small_runs import same, saved, small

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
TOGETHER = {"batch": {"size": 2, "accumulate": 2}, "steps": None, "epochs": 3, "checkpoints": {"every": 100}}
"""Eight samples an update, as one process has it with a batch of 8."""


def main(out: Path) -> None:
    killed = {"factory": "own_parts:failing", "at": 16, "how": "kill", "folder": str(out / "killed")}
    steps = {"batch": {"size": 2, "accumulate": 2}, "steps": 14, "checkpoints": {"every": 4}}
    _trained(out / "killed", **steps, loss=killed)
    _trained(out / "whole", **steps)
    for name, sections in RUNS.items():
        _trained(out / name, **TOGETHER, **sections)
    rank = int(os.environ["RANK"])  # the first reads what it has written; for the other it might be too early
    (out / f"told-{rank}.json").write_text(json.dumps(_told(out) if rank == 0 else {}))


def _told(out: Path) -> dict[str, Any]:
    events = surefoot.read(out / "killed" / "run").events
    return {
        "killed": (out / "killed" / "killed").exists(),
        "resumed": any(event.get("name") == "resumed" for event in events),
        "same": same(saved(out / "killed" / "run"), saved(out / "whole" / "run")),
        **{name: surefoot.read(out / name / "run").scalars["loss"].tolist() for name in RUNS},
    }


def _trained(folder: Path, **sections: Any) -> None:
    """A process that is told to end, because the other was killed, ends; it is started again with it."""
    code = show(small(folder, **sections), ())
    if code != exit_codes.DONE:
        sys.exit(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
