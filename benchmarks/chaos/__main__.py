"""Entry point of the chaos processes: `fork-server PID`, `torchrun PID OPTIONS... PLAN`, or one training run's PLAN."""

from __future__ import annotations

import json
import os
import sys

from benchmarks.chaos.fork_server import serve
from benchmarks.chaos.training_run import RunPlan, main
from surefoot.process_identity import end_with_parent

AGENT_PID = "SUREFOOT_CHAOS_AGENT"
"""Environment variable with torchrun's pid. torchrun starts its workers in sessions of their own, which no signal to
torchrun's process group reaches, so each worker watches this pid."""


def run() -> None:
    if sys.argv[1] == "fork-server":
        end_with_parent(int(sys.argv[2]))
        serve()
    elif sys.argv[1] == "torchrun":
        end_with_parent(int(sys.argv[2]))
        os.environ[AGENT_PID] = str(os.getpid())
        from torch.distributed.run import main as torchrun

        torchrun([*sys.argv[3:-1], "-m", "benchmarks.chaos", sys.argv[-1]])
    else:
        if agent := os.environ.get(AGENT_PID):
            end_with_parent(int(agent))
        main(RunPlan(**json.loads(sys.argv[1])))


if __name__ == "__main__":
    run()
