"""Scenarios of more than one process: real processes that exchange their gradients through gloo."""

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

from surefoot.process_identity import end_with_parent

LIMIT = 120
"""Seconds after which processes that hang are given up."""


def train_together(job: dict[str, Any], ranks: int) -> dict[str, Any]:
    """Run a job in so many processes; what the first of them found."""
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
            subprocess.Popen([*command, str(rank)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
            for rank in range(ranks)
        ]
        try:
            said = [process.communicate(timeout=LIMIT)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.communicate()
        found = Path(folder, "found.json")
        if not found.exists():
            raise RuntimeError(f"the processes of {job} found nothing: {said[0][-2000:].decode()}")
        return json.loads(found.read_text())


def main(folder: str, job: str, ranks: str, parent: str, rank: str) -> None:
    end_with_parent(int(parent))  # a rank whose partner is gone would wait in a collective for half an hour
    import torch
    import torch.distributed as dist

    from benchmarks.zoo.jobs import Job, protector_for
    from benchmarks.zoo.training import train

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=int(ranks))
    todo = Job(**json.loads(job))
    run = todo.scenario.run(int(rank))
    protector = protector_for(todo)
    ending = train(run, protector, DistributedDataParallel(run.model))
    if rank == "0":
        Path(folder, "found.json").write_text(json.dumps({**asdict(ending), "acted": list(protector.acted)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
