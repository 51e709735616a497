from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import surefoot
from surefoot.models.decoder import Decoder, DecoderConfig, next_token_loss
from surefoot.train.mixed_precision import Precision
from surefoot.train.optimizers import make_optimizers
from surefoot.train.recipe.schema import OptimizerSection, PrecisionSection, ScheduleSection
from surefoot.train.schedules import make_schedule

UPDATES, STOP = 10, 6


def _train(run_dir: Path, name: str, compute: Any, until: int) -> nn.Module:
    """Train up to update `until`, resuming from the run directory."""
    torch.manual_seed(0)
    precision = Precision(PrecisionSection(compute=compute), torch.device("cpu"))
    model = precision.prepare(Decoder(DecoderConfig(vocab=32, width=16, layers=1, heads=2, context=8)))
    optimizers = make_optimizers(model, OptimizerSection(name=name, lr=0.01))
    schedules = [make_schedule(optimizer, ScheduleSection(), UPDATES) for optimizer in optimizers]
    scaler = precision.scaler or torch.amp.GradScaler("cpu", enabled=False)
    with surefoot.attach(
        model, optimizers, run_dir=run_dir, resume=True, scheduler=schedules, scaler=precision.scaler
    ) as guard:
        for update in range(schedules[0].last_epoch, until):
            tokens = torch.randint(0, 32, (2, 9), generator=torch.Generator().manual_seed(update))
            with precision.forward():
                loss = next_token_loss(model, tokens)
            scaler.scale(guard.watch(loss, tokens)).backward()
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                scaler.step(optimizer)
                schedule.step()
            scaler.update()
            for optimizer in optimizers:
                optimizer.zero_grad()
    assert schedules[0].last_epoch == until
    return model


@pytest.mark.parametrize(("name", "compute"), [("lamb", "float32"), ("lars", "bfloat16"), ("muon", "float16")])
def test_resumed_run_is_bit_identical_to_an_uninterrupted_one(tmp_path: Path, name: str, compute: str) -> None:
    uninterrupted = _train(tmp_path / "uninterrupted", name, compute, UPDATES)
    _train(tmp_path / "stopped", name, compute, STOP)
    stopped = _train(tmp_path / "stopped", name, compute, UPDATES)
    for param, expected in zip(stopped.parameters(), uninterrupted.parameters(), strict=True):
        assert torch.equal(param, expected)
