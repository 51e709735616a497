"""Planned memory against bytes counted by hand, against the whole model, and against a real step's saved tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from surefoot.models import decoder, next_token
from surefoot.plan.fake_step import FakeStepOptions, language_batch, run_fake_step
from surefoot.plan.memory_plan import PARTS, MemoryPlanner
from surefoot.plan.model_size import model_size
from surefoot.plan.phase_tracker import Bytes
from surefoot.train.recipe import Recipe, load

SMALL = ("model.width=64", "model.layers=6", "model.heads=2", "data.context=64", "model.context=64", "batch.size=4")


def small_recipe(*overrides: str) -> Recipe:
    return load("lm-tiny", [*SMALL, *overrides])[0]


def planner_of(recipe: Recipe) -> MemoryPlanner:
    return MemoryPlanner(model_size(recipe), on_gpu=False)


def parameters_by_hand(recipe: Recipe) -> int:
    shape = recipe.model.arguments
    width, layers, vocab = shape["width"], shape["layers"], shape["vocab"]
    return vocab * width + layers * (3 * width**2 + width**2 + 8 * width**2 + 2 * width) + width


def peak(peaks: dict[Any, Bytes]) -> int:
    return max(sum(by_kind.values()) for by_kind in peaks.values())


@pytest.mark.parametrize(
    ("strategy", "weights", "gradients", "moments"),
    [("data", 1, 1, 1), ("zero1", 1, 1, 4), ("zero2", 4, 4, 4), ("zero3", 4, 4, 4)],
)
def test_weights_gradients_and_adams_moments_are_those_counted_by_hand(
    strategy: str, weights: int, gradients: int, moments: int
) -> None:
    recipe = small_recipe(f"parallel.strategy={strategy}")
    count = parameters_by_hand(recipe)
    split = planner_of(recipe).plan(recipe, ranks=4)
    assert split.weights == 4 * count // weights
    assert split.gradients == 4 * count // gradients
    assert split.optimizer == pytest.approx(8 * count / moments, rel=0.001)  # and a counter of 4 bytes per tensor
    assert split.total == sum(getattr(split, part) for part in PARTS)


def test_one_rank_needs_no_gradients_during_forward_unless_it_accumulates() -> None:
    recipe = small_recipe()
    planner = planner_of(recipe)
    alone = planner.plan(recipe, ranks=1)
    accumulating = planner.plan(small_recipe("batch.accumulate=4"), ranks=1)
    gradients = 4 * parameters_by_hand(recipe)
    assert alone.phase == accumulating.phase == "backward of the output and loss"
    assert alone.gradients < 0.01 * gradients
    assert accumulating.gradients == gradients


@pytest.mark.parametrize(
    "overrides",
    [
        ("precision.compute=bfloat16",),
        ("precision.compute=bfloat16", "speed.checkpoint_activations=1"),
        ("speed.checkpoint_activations=2", "model.layers=11"),
        ("optimizer.name=nadam", "model.dropout=0.1", "model.tied=false"),
        ("speed.attention=math", "precision.compute=bfloat16"),
    ],
    ids=" ".join,
)
def test_short_models_stand_for_the_whole_model(overrides: tuple[str, ...]) -> None:
    recipe = small_recipe(*overrides)
    planned = planner_of(recipe).plan(recipe, ranks=1)
    whole = run_fake_step(recipe, language_batch(recipe), None, 2, FakeStepOptions())
    assert planned.allocated == pytest.approx(peak(whole.peaks), rel=0.02)
    assert planned.measured_blocks < recipe.model.arguments["layers"]


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_activations_are_those_that_a_real_step_saves(compute: str) -> None:
    """At the end of forward a real step keeps what autograd has saved, and autocast its copies of the weights."""
    recipe = small_recipe(f"precision.compute={compute}")
    fake = run_fake_step(recipe, language_batch(recipe), None, 1, FakeStepOptions())
    planned = fake.peaks["backward", "head"]
    model = decoder(**recipe.model.arguments)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = language_batch(recipe)()
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=compute == "bfloat16")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), autocast:
        loss, _ = next_token(model, batch)
    assert loss.isfinite()
    kept = planned["activations"] + planned["weight_copies"]
    assert kept == pytest.approx(sum(saved.values()), rel=0.1)


def test_attention_without_a_fused_kernel_grows_with_the_square_of_the_sequence() -> None:
    def kept_by_attention(context: int, kernel: str) -> int:
        recipe = small_recipe(f"data.context={context}", f"model.context={context}", f"speed.attention={kernel}")
        return planner_of(recipe).plan(recipe, ranks=1).layers[0].kept_by_attention

    assert kept_by_attention(256, "auto") == pytest.approx(2 * kept_by_attention(128, "auto"), rel=0.05)
    short, double, fourfold = (kept_by_attention(context, "math") for context in (128, 256, 512))
    beyond_linear = double - 2 * short  # of a * context ** 2 + b * context this leaves the square
    assert beyond_linear > 0.5 * short
    assert fourfold - 2 * double == pytest.approx(4 * beyond_linear, rel=0.05)


def test_recomputation_keeps_one_tensor_per_block() -> None:
    recipe = small_recipe("speed.checkpoint_activations=1")
    layers = planner_of(recipe).plan(recipe, ranks=1).layers
    batch, shape = recipe.batch.size * recipe.data.context, recipe.model.arguments
    assert layers[0].kept == shape["layers"] * batch * shape["width"] * 4
