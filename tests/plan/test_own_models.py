"""Plans of a user's own model, data and loss."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from surefoot.cli import app

PARTS = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset


def images(count):
    return TensorDataset(torch.zeros(count, 3, 32, 32), torch.zeros(count, dtype=torch.long))


def convolutions(width):
    layers = [nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Dropout(0.1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


class NeedsValues(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = convolutions(8)

    def forward(self, x):
        return self.inner(x) if x.sum().item() > 0 else self.inner(-x)


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_vision.py").write_text(PARTS)
    (tmp_path / "mine.json").write_text(
        json.dumps(
            {
                "epochs": 3,
                "device": "cpu",
                "model": {"factory": "my_vision:convolutions", "width": 8},
                "data": {"kind": "own", "dataset": {"factory": "my_vision:images", "count": 100}, "held_out": 0},
                "loss": "my_vision:loss",
                "batch": {"size": 10},
            }
        )
    )
    yield tmp_path / "mine.json"
    sys.modules.pop("my_vision", None)


def test_a_vision_model_is_planned_from_its_own_data(recipe: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(recipe), "--gpus", "A100", "--json"])
    assert result.exit_code == 0, result.stderr
    plan = json.loads(result.stdout)
    count = (3 * 9 + 1) * 8 + 2 * 8 + 8 * 10 + 10
    assert plan["model"]["parameters"]["value"] == count
    assert plan["steps"]["total_steps"]["value"] == 30
    assert plan["settings"]["optimizer"]["value"] == "sgd"
    convolution = 3 * 9 * 8 * 32 * 32  # products of one image; forward and the weights' gradient, 2 FLOPs each
    assert plan["cost"]["flops_per_sample"]["value"] == pytest.approx(2 * 2 * convolution, rel=0.02)
    value = 4 * 10 * 8 * 32 * 32  # of float32, for every image and channel
    # Kept: the outputs of convolution and ReLU, and one byte for each value of the dropout mask.
    assert plan["memory"]["activations"]["value"] > 2 * value


def test_a_model_that_needs_values_is_refused_with_a_way_out(recipe: Path) -> None:
    override = 'model={"factory": "my_vision:NeedsValues"}'
    result = CliRunner().invoke(app, ["plan", str(recipe), override])
    assert result.exit_code == 2
    assert "cannot run on fake tensors" in result.stderr
    assert "surefoot check" in result.stderr
    assert "Traceback" not in result.output
