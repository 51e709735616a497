"""A collapsed loss scale is set back to a value that worked, without losing a step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import surefoot
from surefoot.actions.action_context import CannotAct
from surefoot.actions.apply import set_loss_scale

LOW_AT = 60


def test_collapsed_loss_scale_is_reset_and_training_continues(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    guard = surefoot.attach(model, optimizer, run_dir=tmp_path / "run", scaler=scaler)
    for step in range(100):
        if step == LOW_AT:
            scaler.update(2.0**-24)
        x = torch.randn(32, 8)
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.mse_loss(model(x), x.sum(1, keepdim=True))
        guard.watch(scaler.scale(loss), x).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    guard.close()
    decisions = [e for e in surefoot.read(tmp_path / "run").events if e["kind"] == "decision"]
    assert [(e["action"], e["loss_scale"]) for e in decisions] == [("constrain", 2.0**10)]
    assert scaler.get_scale() == 2.0**10
    assert guard.step == 100, "no step was lost"


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu", enabled=False)])
def test_set_loss_scale_needs_an_enabled_grad_scaler(scaler: Any) -> None:
    with pytest.raises(CannotAct, match="pass your GradScaler as scaler="):
        set_loss_scale(SimpleNamespace(scaler=scaler), 1024.0)  # pyright: ignore[reportArgumentType]
