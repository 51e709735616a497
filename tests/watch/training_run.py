"""A small real run in a process of its own: python training_run.py RUN_DIR [STEPS] [SECONDS_PER_STEP] [resume].

Step 40 of the first attempt has a batch of NaN; from step 80 on the weights are damaged once.
"""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

import surefoot


def main(run_dir: str, steps: int, pause: float, *, resume: bool) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    policy = surefoot.Policy(snapshot_every=10, save_every=25)
    guard = surefoot.attach(model, optimizer, run_dir=run_dir, policy=policy, resume=resume)
    guard.report(total_steps=steps)
    attempt = 0
    while guard.step < steps:
        x = torch.randn(32, 8)
        y = x.sum(1, keepdim=True)
        if not resume and attempt == 40:
            x[3, 2] = float("nan")
        if not resume and attempt == 80:
            with torch.no_grad():
                model[4].weight.mul_(60)
        loss = guard.watch(nn.functional.mse_loss(model(x), y), x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        attempt += 1
        time.sleep(pause)
    guard.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), resume="resume" in sys.argv)
