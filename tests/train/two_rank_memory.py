"""Run by torchrun with two ranks and a restart: the second rank alone runs out of memory.

In forward, and in backward before the last micro-batch, it makes its part again while the first rank waits. In the
backward in which gradients are exchanged both end, and the restart continues in smaller micro-batches.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from small_runs import small_recipe

sys.path.insert(0, str(Path(__file__).parents[2]))

import surefoot
from benchmarks.planted_memory import PLANT, Limit
from surefoot.cli.train import show
from surefoot.train import exit_codes

LANGUAGE: dict[str, Any] = {
    "loss": {"factory": "benchmarks.planted_memory:sum_loss"},
    "optimizer": {"name": "benchmarks.planted_memory:AdamW", "lr": 3e-3, "weight_decay": 0.1, "betas": [0.9, 0.95]},
    "batch": {"size": 4},
    "checkpoints": {"every": 3},
}
RUNS = {
    "undisturbed": ([], {}),
    "forward": ([Limit("forward", 2, first=5)], {}),
    "backward": ([Limit("backward", 1, first=5)], {"batch": {"size": 2, "accumulate": 2}}),
    "evaluation": ([Limit("evaluation", 1, first=3)], {}),
    "exchange": ([Limit("backward", 2, first=5)], {}),
}


def main(out: Path) -> None:
    rank = int(os.environ["RANK"])
    for name, (limits, sections) in RUNS.items():
        PLANT.limits, PLANT.hits, PLANT.updates = limits if rank == 1 else [], [], 0
        code = show(small_recipe(out / name, **LANGUAGE | sections), ())
        if code != exit_codes.DONE:
            (out / f"ended-{name}-{rank}").write_text(str(code))
            sys.exit(code)
    (out / f"results-{rank}.json").write_text(json.dumps(_results(out)))


def _results(out: Path) -> dict[str, Any]:
    results: dict[str, Any] = {path.name: path.read_text() for path in out.glob("ended-*")}
    for name in RUNS:
        run = surefoot.read(out / name / "run")
        decisions = [e for e in run.events if e["kind"] == "decision" and e["action"] == "reduce_memory"]
        results[name] = {
            "losses": run.scalars["loss"].tolist(),
            "steps": run.scalars["step"].tolist(),
            "reasons": [e["reason"] for e in decisions],
            "ranks": [e["rank"] for e in decisions],
            "evals": [e["values"]["eval_loss"] for e in run.events if "eval_loss" in e.get("values", {})],
        }
    return results


if __name__ == "__main__":
    main(Path(sys.argv[1]))
