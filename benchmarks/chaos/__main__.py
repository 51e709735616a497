"""What the processes of the bench run: the nursery, torchrun, or one victim, whose plan comes as JSON."""

from __future__ import annotations

import json
import os
import sys

from benchmarks.chaos.fork_server import serve
from benchmarks.chaos.training_run import Plan, main
from surefoot.process_identity import end_with_parent

AGENT = "SUREFOOT_CHAOS_AGENT"
"""The environment variable in which a victim under torchrun is told which process that is: torchrun starts it in a
session of its own, so that no signal to torchrun's process group reaches it."""


def run() -> None:
    if sys.argv[1] == "nursery":
        end_with_parent(int(sys.argv[2]))
        serve()
    elif sys.argv[1] == "torchrun":
        end_with_parent(int(sys.argv[2]))
        os.environ[AGENT] = str(os.getpid())
        from torch.distributed.run import main as torchrun

        torchrun([*sys.argv[3:-1], "-m", "benchmarks.chaos", sys.argv[-1]])
    else:
        if agent := os.environ.get(AGENT):
            end_with_parent(int(agent))
        main(Plan(**json.loads(sys.argv[1])))


if __name__ == "__main__":
    run()
