"""Builds the parts of a run from a recipe: model, data, optimizers, schedules; nothing is trained here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from surefoot import parallel
from surefoot.data.corpus import TrainingData, check_vocab, open_data
from surefoot.parallel import World
from surefoot.train import speed
from surefoot.train.factories import accepts_two_arguments, call_factory, find_factory
from surefoot.train.make_model import check_model, make_model
from surefoot.train.mixed_precision import Precision
from surefoot.train.optimizers import make_optimizers, scaled_lr
from surefoot.train.recipe.errors import RecipeError
from surefoot.train.recipe.schema import Recipe
from surefoot.train.schedules import make_schedule

LossFunction = Callable[[Any, Any], Tensor | tuple[Tensor, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """Everything the training loop needs."""

    recipe: Recipe
    world: World
    model: nn.Module
    """As trained: replicated or sharded over the ranks."""
    forward: Callable[..., Any]
    """The model to call: compiled if the recipe says so."""
    loss: LossFunction
    data: TrainingData
    optimizers: list[Optimizer]
    schedules: list[LambdaLR]
    precision: Precision
    total: int
    """Updates of the whole run."""
    parameters: int
    notes: list[str]
    """Remarks to print at the start."""

    @property
    def step(self) -> int:
        """Updates made so far; a rewind lowers it."""
        return self.schedules[0].last_epoch

    @property
    def effective_batch(self) -> int:
        return effective_batch(self.recipe, self.world)


def effective_batch(recipe: Recipe, world: World) -> int:
    """Samples per update over all ranks."""
    return recipe.batch.size * recipe.batch.accumulate * world.size


def build(recipe: Recipe, world: World) -> RunParts:
    """Build all parts; problems raise with the way out before anything slow begins."""
    speed.configure_torch(recipe.speed, world.device, recipe.precision.compute)
    speed.seed_everything(recipe.seed)
    loss = make_loss(recipe)
    check_model(recipe, world)
    data = _open_data(recipe, world)
    vocab = recipe.model.arguments.get("vocab")
    if isinstance(vocab, int):
        check_vocab(data, vocab)
    speed.seed_everything(recipe.seed)  # again: the weights must not depend on how the data was read
    model = make_model(recipe)
    parameters = sum(p.numel() for p in model.parameters())
    strategy = recipe.parallel.strategy
    is_sharded = parallel.shards_weights(strategy, world)
    precision = Precision(recipe.precision, world.device, sharded=is_sharded)
    precision.prepare(model)
    speed.checkpoint_activations(model, recipe.speed.checkpoint_activations)
    model, notes = parallel.sync_batch_norms(
        model, world, samples=recipe.batch.size, accumulate=recipe.batch.accumulate
    )
    if recipe.speed.compile and is_sharded:
        for block in parallel.find_blocks(model):
            block.forward = speed.compiled(block.forward, True)
    float32_modules = precision.float32_modules(model) if is_sharded else ()
    model = parallel.wrap_model(model, strategy, world, compute_dtype=precision.compute, keep_float32=float32_modules)
    forward = speed.compiled(model, recipe.speed.compile and not is_sharded)
    lr = scaled_lr(recipe.optimizer, effective_batch(recipe, world))
    optimizers = [
        parallel.shard_optimizer(optimizer, strategy, world)
        for optimizer in make_optimizers(model, recipe.optimizer, lr=lr)
    ]
    total = total_steps(recipe, data)
    schedules = [make_schedule(optimizer, recipe.schedule, total) for optimizer in optimizers]
    speed.seed_everything(recipe.seed, world.rank)
    return RunParts(
        recipe=recipe,
        world=world,
        model=model,
        forward=forward,
        loss=loss,
        data=data,
        optimizers=optimizers,
        schedules=schedules,
        precision=precision,
        total=total,
        parameters=parameters,
        notes=[*notes, *data.notes],
    )


def total_steps(recipe: Recipe, data: TrainingData) -> int:
    """Updates of the whole run."""
    if recipe.steps is not None:
        return recipe.steps
    per_epoch = math.ceil(len(data.train_loader) / recipe.batch.accumulate)
    return max(1, round((recipe.epochs or 1) * per_epoch))


def peak_lr_and_steps(recipe: Recipe, world: World) -> tuple[float, int]:
    """Peak lr and updates of the whole run; the data is opened only where it determines their number."""
    lr = scaled_lr(recipe.optimizer, effective_batch(recipe, world))
    return lr, recipe.steps if recipe.steps is not None else total_steps(recipe, _open_data(recipe, world))


def run_dir_of(recipe: Recipe) -> Path:
    return Path(recipe.run_dir or f"runs/{recipe.name}")


def _open_data(recipe: Recipe, world: World) -> TrainingData:
    spec = recipe.data
    custom: dict[str, Any] = {}
    if spec.kind == "own":
        if spec.dataset is None:
            raise RecipeError("data.dataset: missing; kind own needs module:name of what makes the dataset")
        custom["dataset"] = call_factory("data.dataset", spec.dataset)
        if spec.held_out_dataset is not None:
            custom["eval_dataset"] = call_factory("data.held_out_dataset", spec.held_out_dataset)
        if spec.collate is not None:
            custom["collate"] = find_factory("data.collate", spec.collate)
    return open_data(
        spec,
        seed=recipe.seed,
        rank=world.rank,
        world_size=world.size,
        batch_size=recipe.batch.size,
        pin_memory=world.device.type == "cuda",
        **custom,
    )


def make_loss(recipe: Recipe) -> LossFunction:
    """The loss function itself, or what it returns when the recipe gives it arguments."""
    spec = recipe.loss
    loss: Any = call_factory("loss", spec) if spec.arguments else find_factory("loss.factory", spec.factory)
    if not accepts_two_arguments(loss):
        what = f"{spec.factory} returned a {type(loss).__name__} that" if spec.arguments else spec.factory
        raise RecipeError(
            f"loss.factory: {what} cannot be called with (model, batch). Name a function that can, or one that "
            "returns such a function from the arguments given beside it"
        )
    return loss
