"""A small run whose learning rate jumps, and hand-written cases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import surefoot
from surefoot.cases.case_record import Case

FAULT, STEPS = 120, 200
CASE = Case(
    run="old",
    step=150,
    cause="learning_rate",
    confidence=0.9,
    causes=("learning_rate", "schedule"),
    findings=("hyperparam_change", "norm_outlier", "jump"),
    patterns=("jump",),
    model="Sequential",
    family="mlp",
    optimizer="AdamW",
    phase="early",
    actions=("refuse", "rewind"),
    remedies=("rewind",),
    branches={"nothing": None, "clip": 0.3},
    best="clip",
    helped=True,
    loss_before=0.5,
    loss_after=0.4,
)


def case(**values: Any) -> Case:
    return replace(CASE, **values)


def step_fn(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def train(run_dir: Path, *, fault: str = "lr", steps: int = STEPS, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    policy = surefoot.Policy(trial_seconds=600.0)
    guard = surefoot.attach(model, optimizer, run_dir=run_dir, policy=policy, **options)
    generator, weights = torch.Generator().manual_seed(1), torch.linspace(-1, 1, 8)[:, None]
    for k in range(steps):
        x = torch.randn(32, 8, generator=generator)
        y = (x @ weights).sin()
        if fault == "nan" and k == FAULT:
            x[3] = float("nan")
        if fault == "lr" and k == FAULT:
            for group in optimizer.param_groups:
                group["lr"] = 5.0
        loss = guard.watch(step_fn(model, (x, y)), (x, y))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    guard.close()
    return model
