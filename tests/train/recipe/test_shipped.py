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


def test_every_packaged_recipe_is_listed_with_its_size() -> None:
    packaged = {file.name for file in resources.files("surefoot.train.recipe.shipped").iterdir()}
    assert {name for name in packaged if name.endswith(".yaml")} == {f"{name}.yaml" for name in shipped()}
    for path in shipped().values():
        assert "parameters" in summary(path)


@pytest.mark.parametrize(
    ("name", "minimum", "maximum"),
    [("lm-tiny", 0.9e6, 1.1e6), ("lm-small", 23e6, 27e6), ("lm-124m", 120e6, 128e6), ("lm-1b", 0.95e9, 1.05e9)],
)
def test_shipped_recipes_are_valid_and_have_the_stated_size(name: str, minimum: float, maximum: float) -> None:
    (recipe,) = load(name)
    assert remarks(recipe) == []
    assert recipe.data.kind == "library", "needs no download"
    assert recipe.name == name
    with torch.device("meta"):
        model = Decoder(DecoderConfig(**recipe.model.arguments))
    assert minimum < count_parameters(model) < maximum


def test_commented_out_keys_of_shipped_recipes_are_valid() -> None:
    for name, path in shipped().items():
        commented_keys = [line.strip()[2:] for line in path.read_text().splitlines() if line.startswith("  # ")]
        keys = [f"data.{line.partition('#')[0].strip().replace(': ', '=', 1)}" for line in commented_keys]
        (recipe,) = load(name, keys)
        assert recipe.data.kind != "library" or not keys


def test_lm_small_has_the_specified_settings() -> None:
    (recipe,) = load("lm-small")
    model = recipe.model.arguments
    assert (model["width"], model["layers"], recipe.data.context) == (512, 8, 340)
    assert (recipe.batch.size, recipe.batch.accumulate) == (32, 8)
    assert (recipe.optimizer.lr, recipe.protection.clip, recipe.precision.compute) == (5e-4, 1.0, "bfloat16")


def test_recipes_load_without_torch() -> None:
    code = "import sys; from surefoot.train.recipe import load; load('lm-tiny'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
