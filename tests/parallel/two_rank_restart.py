"""Run by torchrun with two ranks, of which the second kills itself once, after a checkpoint has been written.

The same run is first trained without a kill; the results compare the two.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import surefoot
from surefoot import parallel
from surefoot.data import make_loader

STEPS, FATAL = 24, 7
STRATEGY = "zero1"
"""Data parallel with a sharded optimizer."""


def train(world: parallel.World, run_dir: Path, fatal: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.2), nn.Linear(16, 6))
    model = parallel.wrap_model(net, STRATEGY, world)
    torch.manual_seed(1 + world.rank)
    optimizer = parallel.shard_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-3), STRATEGY, world)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data: Any = torch.randn(37, 6, generator=torch.Generator().manual_seed(3))
    loader = make_loader(data, 3, seed=5)
    options: dict[str, Any] = {"scheduler": scheduler, "loader": loader, "policy": surefoot.Policy(save_every=2)}
    first_step = 0
    with surefoot.attach(model, optimizer, run_dir=run_dir, resume=True, **options) as guard:
        first_step = done = guard.step
        while done < STEPS:
            for x in loader:
                loss = (model(x) - x).square().mean()
                guard.watch(loss, x).backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                done += 1
                if fatal and world.rank == 1 and done >= FATAL:
                    if any(run_dir.glob("checkpoints/step-*")):
                        os.kill(os.getpid(), signal.SIGKILL)
                    time.sleep(0.25)  # a save takes longer than these steps
                if done >= STEPS:
                    break
    optimizer_states = getattr(optimizer, "optim", optimizer).state.values()
    tensors = [*model.state_dict().values(), *(v for s in optimizer_states for v in s.values())]
    plain = [t.full_tensor() if isinstance(t, DTensor) else t for t in tensors]
    return {
        "first_step": first_step,
        "end": [t.double().flatten().tolist() for t in plain],
        "lr": scheduler.get_last_lr(),
    }


def main() -> None:
    out, restarts = Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.set_num_threads(1)
    world = parallel.init_distributed("cpu", timeout=60)
    uninterrupted = train(world, out / "straight", fatal=False)
    killed = train(world, out / "killed", fatal=restarts == 0)
    results = {
        "restarts": restarts,
        "first_step": killed["first_step"],
        "same": {k: killed[k] == uninterrupted[k] for k in ("end", "lr")},
    }
    (out / f"results-{world.rank}.json").write_text(json.dumps(results))
    parallel.shutdown(world)


if __name__ == "__main__":
    main()
