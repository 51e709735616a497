"""`Checkpoints` in a loop that uses nothing else of surefoot."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import surefoot
from surefoot.checkpoint.format.hashing import hash_state
from surefoot.checkpoint.format.param_names import name_state
from surefoot.checkpoint.store import CheckpointStore
from surefoot.checkpoint.train_state import TrainState
from surefoot.data import make_loader


class Loop:
    """A user's training loop and the few lines that save it."""

    def __init__(self, run: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.loader = make_loader(torch.randn(64, 4, generator=torch.Generator().manual_seed(3)), 4, seed=3)
        self.saved = surefoot.checkpoint.Checkpoints(run, self.model, self.optimizer, loader=self.loader, **options)
        self.resumed = self.saved.resume()

    def train(self, updates: int) -> list[float]:
        losses: list[float] = []
        with self.saved:
            while len(losses) < updates:
                for x in self.loader:
                    loss = self.model(x).square().mean()
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
                    losses.append(loss.item())
                    self.saved.step(loss=loss)
                    if len(losses) == updates:
                        break
        return losses


def test_loop_resumes_exactly_from_its_last_checkpoint(tmp_path: Path) -> None:
    unbroken = Loop(tmp_path / "unbroken").train(30)
    first = Loop(tmp_path / "run", every=10)
    assert first.resumed is None
    assert first.train(20) == unbroken[:20]
    second = Loop(tmp_path / "run", every=10)
    assert second.resumed is not None
    assert (second.resumed.step, second.resumed.equal, second.saved.count) == (20, True, 20)
    assert second.train(10) == unbroken[20:]


def test_checkpoint_records_the_loss_of_the_last_update(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    losses = loop.train(5)
    (checkpoint,) = CheckpointStore(tmp_path / "checkpoints").all()
    assert checkpoint.about["metrics"] == {"loss": losses[-1]}


def test_non_scalar_metric_is_refused_at_once(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    with pytest.raises(ValueError, match="loss: a metric must be a single number"):
        loop.saved.step(loss=torch.ones(3))
    assert loop.saved.count == 0


@pytest.mark.parametrize("invalid", [{"every": 0}, {"seconds": 0.0}])
def test_invalid_save_interval_is_refused(invalid: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="every must be at least 1 and seconds above 0"):
        Loop(tmp_path, **invalid)


def test_retention_is_configurable(tmp_path: Path) -> None:
    Loop(tmp_path, every=5, keep=surefoot.checkpoint.Retention(last=2, spaced=0)).train(40)
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) <= 3


def test_sharded_model_is_not_saved_partially(tmp_path: Path) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Linear(4, 4, bias=False)
        shard = DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)])
        model.weight = nn.Parameter(shard)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert not surefoot.checkpoint.Checkpoints(tmp_path, model, optimizer).save()
        assert not list((tmp_path / "checkpoints").glob("step-*"))
    finally:
        dist.destroy_process_group()


def test_hash_is_stable_across_versions() -> None:
    """Hashes stored by older versions are compared with hashes computed now."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    ema = nn.Linear(1, 1, bias=False)
    for p in (*model.parameters(), *ema.parameters()):
        nn.init.constant_(p, 0.5)
    for p in model.parameters():
        optimizer.state[p] = {"step": torch.tensor(3.0), "exp_avg": torch.full_like(p, 0.25)}
    train_state = TrainState(model, optimizer, extra={"ema": ema})
    live_state = train_state.collect()
    extra_state: Any = {"$a": (1, math.inf), "tensor": live_state.slot(torch.arange(3))}
    rng_states = [(None, 1), (None, 2), (None, 3)]
    live_state.rest = replace(
        live_state.rest, param_groups=[[{"lr": 0.5}]], rng_states=rng_states, extra={"more": extra_state}
    )
    assert hash_state(live_state, name_state(train_state)) == "139be364b2732349e056eb14958f3b49"


@pytest.mark.parametrize("name", ["Checkpoints", "Resumed", "Retention"])
def test_public_names_are_importable(name: str) -> None:
    assert name in dir(surefoot.checkpoint)
    assert getattr(surefoot.checkpoint, name).__name__ == name
