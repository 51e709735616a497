from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import surefoot
from surefoot.train.recipe import Recipe, load
from surefoot.train.run_record import run_record

RECIPE = "# mine\nmodel: torch.nn:Linear\nsteps: 10\nseed: 7\n"


@dataclass
class Data:
    hash: str = "xxh3:0123"
    samples: int = 400
    tokens: int | None = None


def run_json_of(run: Path, run_info: dict[str, Any] | None = None) -> dict[str, Any]:
    """The content of `run.json` after an attach."""
    model = nn.Linear(2, 1)
    surefoot.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=run, run_info=run_info).close()
    return surefoot.read(run).info


def test_run_json_has_the_recipe_the_data_and_the_seeds(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(RECIPE)
    overrides = ["optimizer.lr=1e-3"]
    (recipe,) = load(str(file), overrides)
    record = run_record(recipe, source=str(file), overrides=overrides, data=Data(), effective_batch=64)
    info = run_json_of(tmp_path / "run", record)
    assert info["recipe"]["text"] == RECIPE
    assert info["recipe"]["overrides"] == overrides
    assert info["data"] == {"hash": "xxh3:0123", "samples": 400, "tokens": None}
    assert info["seeds"]["recipe"] == 7
    assert info["config"]["effective_batch"] == 64
    assert Recipe.model_validate(info["recipe"]["resolved"]) == recipe
    assert info["recipe"]["resolved"]["optimizer"]["lr"] == 1e-3


def test_run_json_keeps_what_attach_writes(tmp_path: Path) -> None:
    recipe = Recipe.model_validate({"model": "torch.nn:Linear"})
    bare = run_json_of(tmp_path / "bare")
    info = run_json_of(tmp_path / "run", run_record(recipe, source="no longer there.yaml", effective_batch=64))
    assert info["recipe"]["text"] is None
    assert {"code", "environment", "surefoot", "schema"} <= set(info)
    assert set(bare) | {"recipe"} == set(info)
    assert info["config"]["processes"] == 1
    assert info["config"]["policy"] == bare["config"]["policy"]
    assert set(bare["seeds"]) < set(info["seeds"])


def test_run_info_must_be_a_mapping(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run_info= must be a mapping"):
        run_json_of(tmp_path / "run", ["a config"])  # type: ignore[arg-type]
