"""A loader with an exact position: stopped within an epoch, resumed there, with a damaged sample banned.

python examples/exact_data.py [RUN_DIR]
"""

import json
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import surefoot
from surefoot.data import make_loader

run_dir = sys.argv[1] if len(sys.argv) > 1 else "runs/exact_data"
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
x = torch.randn(1000, 16)
dataset = TensorDataset(x.clone(), x.sum(dim=1, keepdim=True))
dataset.tensors[0][123, 4] = float("nan")

guard = surefoot.attach(model, optimizer, run_dir=run_dir)


def train(loader, epochs, max_updates):
    """Continues from the loader's position."""
    for _ in range(loader.epoch, epochs):
        for x, y in loader:
            loss = guard.watch(nn.functional.mse_loss(model(x), y), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            damaged = x.isnan().any(dim=1)
            if damaged.any():
                banned = [loader.last_samples[row] for row in damaged.nonzero().flatten()]
                print(f"banned samples {banned}")
                loader.ban(banned)
            max_updates -= 1
            if max_updates == 0:
                return


loader = make_loader(dataset, 32, seed=0)
train(loader, epochs=3, max_updates=40)
position = json.dumps(loader.state_dict())  # a few numbers; surefoot saves them in its checkpoints
print(f"stopped at {position}")

loader = make_loader(dataset, 16, seed=0, num_workers=1)  # other batch size and workers, same next sample
loader.load_state_dict(json.loads(position))
train(loader, epochs=3, max_updates=1000)
guard.close()

run = surefoot.read(run_dir)
for event in run.events:
    if event["kind"] == "decision":
        print(f"update {event['step']}: {event['action']}, {event['reason']}")
print(f"loss {run.scalars['loss'][0]:.2f} -> {run.scalars['loss'][-1]:.2f}")
print(f"all weights finite: {all(bool(t.isfinite().all()) for t in model.state_dict().values())}")
