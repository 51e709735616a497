"""surefoot in a plain PyTorch loop: two added lines refuse the update of a damaged batch.

python examples/plain_loop.py [RUN_DIR]
"""

import sys

import torch
from torch import nn

import surefoot

run_dir = sys.argv[1] if len(sys.argv) > 1 else "runs/plain_loop"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def batches(count=100, damaged=40):
    for i in range(count):
        x = torch.randn(32, 16)
        y = x.sum(dim=1, keepdim=True)
        if i == damaged:
            x[7, 3] = float("nan")
        yield x, y


guard = surefoot.attach(model, optimizer, run_dir=run_dir)
for x, y in batches():
    loss = nn.functional.mse_loss(model(x), y)
    loss = guard.watch(loss, x)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
guard.close()

run = surefoot.read(run_dir)
print(f"{run.scalars.rows} updates attempted, {guard.step} applied")
for event in run.events:
    if event["kind"] == "decision":
        print(f"update {event['step']}: {event['action']}, {event['reason']}")
print(f"loss {run.scalars['loss'][0]:.2f} -> {run.scalars['loss'][-1]:.2f}")
print(f"all weights finite: {all(bool(t.isfinite().all()) for t in model.state_dict().values())}")
