"""Files of earlier versions are still read: a run directory with its checkpoints, and recipes.

`stored/attached` was written by version 0.1.0 as of commit eb0af31: 100 attempts of a small model, a NaN batch at
attempt 60, weights multiplied by 100 at attempt 80 and the rewind that followed, and checkpoints of steps 50 and 61.
`stored/recipes` are the recipes that shipped with it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import surefoot
from surefoot.cli import app
from surefoot.train.recipe.load_recipe import load

STORED = Path(__file__).parent / "stored"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STORED / "attached", tmp_path / "run"))


def build() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 50)


def test_stored_run_is_read(run_dir: Path) -> None:
    run = surefoot.read(run_dir)
    assert run.scalars["attempt"].tolist() == list(range(100))
    refused = run.scalars["verdict"] != 0
    assert np.flatnonzero(refused).tolist()[0] == 60
    assert np.isnan(run.scalars["loss"][60])
    assert set(run.layers) == {f"{layer}.{kind}" for layer in (0, 1, 3) for kind in ("weight", "bias")}
    decisions = [(e["action"], e["attempt"]) for e in run.events if e["kind"] == "decision"]
    assert ("refuse", 60) in decisions
    assert "rewind" in [action for action, _ in decisions]
    assert {e["cause"] for e in run.events if e["kind"] == "diagnosis"} >= {"weights_damaged"}


def test_stored_run_resumes_from_its_newest_checkpoint(run_dir: Path) -> None:
    model, optimizer, schedule = build()
    with surefoot.attach(model, optimizer, run_dir=run_dir, resume=True, scheduler=schedule) as guard:
        assert guard.step == 61
        assert float(optimizer.state[next(model.parameters())]["step"]) == 61
        assert schedule.last_epoch > 50
        for i in range(5):
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(200 + i))
            loss = guard.watch((model(x) - x.sum(1, keepdim=True)).pow(2).mean(), x)
            assert loss.item() < 1.0, "these are the trained weights"
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    assert guard.step == 66
    run = surefoot.read(run_dir)
    assert run.scalars["attempt"].tolist() == list(range(105)), "old and new rows are one series"
    assert not [e for e in run.events if e.get("name") == "degraded"]
    (resumed,) = [e for e in run.events if e.get("name") == "resumed" and e["values"]["step"] == 61]
    assert not [note for note in resumed["values"]["notes"] if "judge" in note], "the judge loads its old state"


def test_stored_run_is_diagnosed_and_its_checkpoints_verify(run_dir: Path) -> None:
    result = CliRunner().invoke(app, ["diagnose", str(run_dir), "--json"])
    assert result.exit_code == 1, result.output
    diagnosis = json.loads(result.output)
    assert diagnosis["verdict"] == "warning"
    assert "weights_damaged" in [cause["cause"] for cause in diagnosis["causes"]]
    verified = CliRunner().invoke(app, ["checkpoints", "verify", str(run_dir), "--json"])
    assert verified.exit_code == 0, verified.output


@pytest.mark.parametrize("path", sorted(STORED.glob("recipes/*.yaml")), ids=lambda path: path.stem)
def test_stored_recipe_is_accepted(path: Path) -> None:
    (recipe,) = load(str(path))
    assert recipe.name == path.stem
