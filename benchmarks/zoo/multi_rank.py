"""Trains scenarios of several ranks: real processes that exchange gradients through gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from benchmarks.checkout import worker_env
from surefoot.process_identity import end_with_parent

TIMEOUT_SECONDS = 120
"""Ranks that run longer than this are killed."""


def train_ranks(job: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Run a job on this many ranks and return the outcome of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "benchmarks.zoo.multi_rank",
            folder,
            json.dumps(job),
            str(ranks),
            str(os.getpid()),
        ]
        processes = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=worker_env())
            for rank in range(ranks)
        ]
        try:
            errors = [process.communicate(timeout=TIMEOUT_SECONDS)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        outcome = Path(folder, "outcome.json")
        if not outcome.exists():
            raise RuntimeError(f"the ranks of {job} left no outcome: {errors[0][-2000:].decode()}")
        return json.loads(outcome.read_text())


def main(folder: str, job: str, ranks: str, parent: str, rank: str) -> None:
    end_with_parent(int(parent))  # a rank whose peer is gone would wait in a collective for half an hour
    import torch
    import torch.distributed as dist

    from benchmarks.zoo.jobs import ZooJob, protector_for
    from benchmarks.zoo.training import train

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=int(ranks))
    zoo_job = ZooJob(**json.loads(job))
    run = zoo_job.scenario.run(int(rank))
    protector = protector_for(zoo_job)
    result = train(run, protector, DistributedDataParallel(run.model))
    if rank == "0":
        Path(folder, "outcome.json").write_text(json.dumps({**asdict(result), "acted": list(protector.acted)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
