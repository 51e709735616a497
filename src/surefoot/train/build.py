"""From a recipe to the parts of a run: model, data, optimizers, schedules; nothing has been trained yet."""

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
from surefoot.train.factories import find, make, takes_two
from surefoot.train.making import check_model, make_model
from surefoot.train.optimizers import make_optimizers, scaled_rate
from surefoot.train.precision import Precision
from surefoot.train.recipe.mistakes import RecipeError
from surefoot.train.recipe.schema import Recipe
from surefoot.train.schedules import make_schedule

Loss = Callable[[Any, Any], Tensor | tuple[Tensor, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """All that the loop is made of."""

    recipe: Recipe
    world: World
    model: nn.Module
    """As it is trained: spread over the processes."""
    forward: Callable[..., Any]
    """The same to be called: compiled, where the recipe says so."""
    loss: Loss
    data: TrainingData
    optimizers: list[Optimizer]
    schedules: list[LambdaLR]
    precision: Precision
    total: int
    """Updates of the whole run."""
    parameters: int
    notes: list[str]
    """What the user should know."""

    @property
    def step(self) -> int:
        """Updates made so far; it goes back with the run."""
        return self.schedules[0].last_epoch

    @property
    def effective_batch(self) -> int:
        return self.recipe.batch.size * self.recipe.batch.accumulate * self.world.size


def build(recipe: Recipe, world: World) -> Parts:
    """Make everything; raises an error with the way out before anything long has begun."""
    speed.settle(recipe.speed, world.device, recipe.precision.compute)
    speed.seed_everything(recipe.seed)
    loss = _loss(recipe)
    check_model(recipe, world)
    data = _data(recipe, world)
    vocab = recipe.model.arguments.get("vocab")
    if isinstance(vocab, int):
        check_vocab(data, vocab)
    speed.seed_everything(recipe.seed)  # anew: the weights do not depend on how the data was read
    model = make_model(recipe)
    parameters = sum(p.numel() for p in model.parameters())
    sharded = parallel.shards_weights(recipe.parallel.how, world)
    precision = Precision(recipe.precision, world.device, sharded=sharded)
    precision.prepare(model)
    speed.checkpoint_activations(model, recipe.speed.checkpoint_activations)
    model, told = parallel.sync_batch_norms(model, world, samples=recipe.batch.size, accumulate=recipe.batch.accumulate)
    if recipe.speed.compile and sharded:
        for block in parallel.find_blocks(model):
            block.forward = speed.compiled(block.forward, True)
    kept = precision.kept(model) if sharded else ()
    spread = parallel.wrap_model(model, recipe.parallel.how, world, compute_dtype=precision.compute, keep_float32=kept)
    forward = speed.compiled(spread, recipe.speed.compile and not sharded)
    rate = scaled_rate(recipe.optimizer, recipe.batch.size * recipe.batch.accumulate * world.size)
    optimizers = [
        parallel.shard_optimizer(each, recipe.parallel.how, world)
        for each in make_optimizers(spread, recipe.optimizer, lr=rate)
    ]
    total = total_steps(recipe, data)
    schedules = [make_schedule(each, recipe.schedule, total) for each in optimizers]
    speed.seed_everything(recipe.seed, world.rank)
    return Parts(
        recipe=recipe,
        world=world,
        model=spread,
        forward=forward,
        loss=loss,
        data=data,
        optimizers=optimizers,
        schedules=schedules,
        precision=precision,
        total=total,
        parameters=parameters,
        notes=[*told, *data.notes],
    )


def total_steps(recipe: Recipe, data: TrainingData) -> int:
    """Updates of the whole run."""
    if recipe.steps is not None:
        return recipe.steps
    each = math.ceil(len(data.train_loader) / recipe.batch.accumulate)
    return max(1, round((recipe.epochs or 1) * each))


def planned(recipe: Recipe, world: World) -> tuple[float, int]:
    """The peak rate and the updates of the whole run; data is opened only where it tells how many."""
    rate = scaled_rate(recipe.optimizer, recipe.batch.size * recipe.batch.accumulate * world.size)
    return rate, recipe.steps if recipe.steps is not None else total_steps(recipe, _data(recipe, world))


def run_dir_of(recipe: Recipe) -> Path:
    return Path(recipe.run_dir or f"runs/{recipe.name}")


def _data(recipe: Recipe, world: World) -> TrainingData:
    spec = recipe.data
    own: dict[str, Any] = {}
    if spec.kind == "own":
        if spec.dataset is None:
            raise RecipeError("data.dataset: kind own needs it: module:name of what makes the dataset")
        own["dataset"] = make("data.dataset", spec.dataset)
        if spec.held_out_dataset is not None:
            own["eval_dataset"] = make("data.held_out_dataset", spec.held_out_dataset)
        if spec.collate is not None:
            own["collate"] = find("data.collate", spec.collate)
    return open_data(
        spec,
        seed=recipe.seed,
        rank=world.rank,
        world_size=world.size,
        batch_size=recipe.batch.size,
        pin_memory=world.device.type == "cuda",
        **own,
    )


def _loss(recipe: Recipe) -> Loss:
    """The function itself, or what it makes of the arguments that are given."""
    wanted = recipe.loss
    loss: Any = make("loss", wanted) if wanted.arguments else find("loss.factory", wanted.factory)
    if not takes_two(loss):
        what = f"{wanted.factory} made a {type(loss).__name__} that" if wanted.arguments else wanted.factory
        raise RecipeError(
            f"loss.factory: {what} cannot be called with (model, batch). Name a function that can, or one that makes "
            "such a function of arguments that stand beside it"
        )
    return loss
