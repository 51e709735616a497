"""A small real run with one fault, in this process or in one of its own: python fault_run.py RUN_DIR FAULT."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

import surefoot


def train(run_dir: Path, fault: str) -> None:
    """`fault` is refused or killed (one batch of NaN), rewound (damaged weights) or stopped (NaN from then on)."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    policy = surefoot.Policy(snapshot_every=10, max_consecutive_vetoes=8)
    guard = surefoot.attach(model, optimizer, run_dir=run_dir, policy=policy)
    with contextlib.suppress(surefoot.TrainingStopped), guard:
        for attempt in range(200):
            x = torch.randn(32, 8)
            y = x.sum(1, keepdim=True)
            if attempt == 60 and fault == "rewound":
                with torch.no_grad():
                    model[4].weight.mul_(60)
            elif fault != "rewound" and (attempt == 60 or (fault == "stopped" and attempt > 60)):
                x[3, 2] = float("nan")
            guard.watch(nn.functional.mse_loss(model(x), y), x).backward()
            optimizer.step()
            optimizer.zero_grad()
            if fault == "killed" and attempt > 80 and refusal_is_written(run_dir):
                os.kill(os.getpid(), signal.SIGKILL)


def refusal_is_written(run_dir: Path) -> bool:
    deadline = time.monotonic() + 60
    while '"refuse"' not in (run_dir / "events.jsonl").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return True


if __name__ == "__main__":
    train(Path(sys.argv[1]), sys.argv[2])
