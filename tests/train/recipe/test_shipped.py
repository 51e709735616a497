from __future__ import annotations

import subprocess
import sys
from importlib import resources

import pytest
import torch

from surefoot.models import Decoder, DecoderConfig
from surefoot.models.decoder import count_parameters
from surefoot.train.recipe import load, remarks, shipped
from surefoot.train.recipe.shipped import summary


def test_every_recipe_in_the_package_is_listed_and_says_what_it_needs() -> None:
    packaged = {each.name for each in resources.files("surefoot.train.recipe.shipped").iterdir()}
    assert {name for name in packaged if name.endswith(".yaml")} == {f"{name}.yaml" for name in shipped()}
    for path in shipped().values():
        assert "parameters" in summary(path)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("lm-tiny", 0.9e6, 1.1e6), ("lm-small", 23e6, 27e6), ("lm-124m", 120e6, 128e6), ("lm-1b", 0.95e9, 1.05e9)],
)
def test_a_shipped_recipe_runs_as_it_is_and_has_the_size_it_claims(name: str, least: float, most: float) -> None:
    (recipe,) = load(name)
    assert remarks(recipe) == []
    assert recipe.data.kind == "library", "needs no download"
    assert recipe.name == name
    with torch.device("meta"):
        model = Decoder(DecoderConfig(**recipe.model.arguments))
    assert least < count_parameters(model) < most


def test_the_commented_out_keys_of_a_shipped_recipe_can_be_used() -> None:
    for name, path in shipped().items():
        offered = [line.strip()[2:] for line in path.read_text().splitlines() if line.startswith("  # ")]
        keys = [f"data.{line.partition('#')[0].strip().replace(': ', '=', 1)}" for line in offered]
        (recipe,) = load(name, keys)
        assert recipe.data.kind != "library" or not keys


def test_the_small_recipe_keeps_the_figures_it_was_asked_for_with() -> None:
    (recipe,) = load("lm-small")
    model = recipe.model.arguments
    assert (model["width"], model["layers"], recipe.data.context) == (512, 8, 340)
    assert (recipe.batch.size, recipe.batch.accumulate) == (32, 8)
    assert (recipe.optimizer.lr, recipe.protection.clip, recipe.precision.compute) == (5e-4, 1.0, "bfloat16")


def test_a_recipe_is_read_without_torch() -> None:
    code = "import sys; from surefoot.train.recipe import load; load('lm-tiny'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
