"""A small training that sends alarms: python alarmed_run.py RUN_DIR HOW; HOW it ends: well, raises, killed or hangs."""

import os
import sys
import time

import torch
from torch import nn

import surefoot

run_dir, how = sys.argv[1:3]
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
guard = surefoot.attach(model, optimizer, run_dir=run_dir)
for step in range(40):
    x = torch.randn(8, 4)
    if step == 20:
        x[0, 0] = float("nan")
    loss = guard.watch((model(x) - x.sum(1, keepdim=True)).square().mean(), x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if how == "raises":
    raise RuntimeError("the loop broke")
if how in ("killed", "hangs"):
    time.sleep(1.0)  # the journal is written within a quarter of a second
    print("ready", flush=True)
    if how == "hangs":
        time.sleep(600)
    os.kill(os.getpid(), 9)
guard.close()
