"""A trial: trains the first updates of a recipe for real, in a temporary folder."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

from torch import nn

from surefoot import parallel
from surefoot.data.data_error import UnreadableSample
from surefoot.guard.attach import Guard
from surefoot.journal.reader import Run, read
from surefoot.parallel import World
from surefoot.train.build import RunParts, build, run_dir_of
from surefoot.train.evaluate import evaluate
from surefoot.train.loop import train
from surefoot.train.preflight.data_stats import DataStats
from surefoot.train.recipe import Recipe, RecipeError
from surefoot.train.session import Invocation, attach_guard

_CLOCK_EVERY = 5
"""Updates between two looks at the clock where several ranks must agree that time is up."""
_WEIGHTS_EVERY = 10
"""Updates between two measurements of the weights; a long run measures less often."""


class TimeIsUp(Exception):
    """The trial reached its time limit."""


@dataclass(slots=True)
class TrialFacts:
    """What is known of a trial's parts once they are built."""

    total: int
    parameters: int
    effective_batch: int
    lr: float
    vocab: int | None
    embeddings: frozenset[str]
    """Tensors of which only the rows in use have a gradient."""
    notes: list[str]
    unreadable: list[UnreadableSample]
    eval_batches: int | None
    workers: int
    """Processes that read the data of this rank."""


@dataclass(slots=True)
class ShortRun:
    """The result of a trial."""

    facts: TrialFacts
    train_data: DataStats = field(default_factory=DataStats)
    eval_data: DataStats | None = None
    eval_loss: float | None = None
    eval_seconds: float = 0.0
    steps: int = 0
    wanted: int = 0
    timed_out: bool = False
    error: BaseException | None = None
    """What ended it early."""
    run: Run | None = None
    """Its journal, read back."""


@dataclass(slots=True, kw_only=True)
class TrialLimit:
    """How long a trial trains, and what it calls after each update."""

    updates: int
    seconds: float = float("inf")
    on_update: Callable[[int, float | None], None] = lambda step, loss: None


class TrialFolder:
    """A temporary folder beside the run's own, so on the same disk, shared by all ranks; new parent folders go too."""

    def __init__(self, recipe: Recipe, world: World) -> None:
        parent = run_dir_of(recipe).absolute().parent
        self._is_first = world.is_main
        self._new_parents = [folder for folder in (parent, *parent.parents) if not folder.exists()]
        self.path = parallel.broadcast(world, parent / f".check-{uuid4().hex[:8]}")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecipeError(f"run_dir: cannot write to {parent}: {error.strerror}. Choose another") from error

    def remove(self) -> None:
        """On the first rank, after all ranks are done."""
        if not self._is_first:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        for folder in self._new_parents:
            if folder.exists() and not any(folder.iterdir()):
                folder.rmdir()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.remove()


class _TrialListener:
    """Reports each update of the loop, and ends it when time is up."""

    def __init__(self, parts: RunParts, limit: TrialLimit) -> None:
        self._parts, self._limit = parts, limit
        self._start = time.monotonic()

    def updated(self, guard: Guard, tokens: int | None) -> None:
        if tokens is not None:
            guard.report(tokens=tokens)
        latest = guard.latest
        self._limit.on_update(self._parts.step, None if latest is None else latest.loss)
        world, seconds = self._parts.world, self._limit.seconds
        if seconds < float("inf") and (world.size == 1 or self._parts.step % _CLOCK_EVERY == 0):
            time_is_up = time.monotonic() - self._start > seconds
            if parallel.all_reduce_sum(world, int(time_is_up)):
                raise TimeIsUp

    def evaluated(self, guard: Guard, step: int, loss: float | None) -> None:
        pass


class _InspectedLoader:
    """A loader whose first epoch is added to `DataStats`."""

    def __init__(self, loader: Any, stats: DataStats) -> None:
        self._loader, self._stats, self._epoch = loader, stats, 0

    def __iter__(self) -> Any:
        self._epoch += 1
        return self._stats.observe(self._loader) if self._epoch == 1 else iter(self._loader)


def run_trial(recipe: Recipe, world: World, folder: Path, limit: TrialLimit, *, inspect_data: bool = False) -> ShortRun:
    """Train up to an update, resuming whatever the folder holds, and read the journal back.

    An error before the first update is the recipe's and is raised; an error during training becomes `ShortRun.error`.
    """
    parts = build(_trial_recipe(recipe, folder), world)
    trial = ShortRun(_facts(parts))
    trial.wanted = min(limit.updates, parts.total)
    loader = (
        cast(Any, _InspectedLoader(parts.data.train_loader, trial.train_data))
        if inspect_data
        else parts.data.train_loader
    )
    limited = replace(parts, total=trial.wanted, data=replace(parts.data, train_loader=loader))
    try:
        with attach_guard(parts, Invocation("check"), trial=True) as guard:
            try:
                train(limited, guard, _TrialListener(parts, limit))
            except TimeIsUp:
                trial.timed_out = True
            if inspect_data:
                _evaluate(parts, trial)
    except RecipeError:
        raise
    except Exception as error:
        trial.error = error
    trial.steps = parts.step
    trial.facts.unreadable = parts.data.unreadable
    if world.is_main and folder.is_dir():
        trial.run = read(folder)
    return trial


def _evaluate(parts: RunParts, trial: ShortRun) -> None:
    if parts.data.eval_loader is None:
        return
    start = time.monotonic()
    trial.eval_loss = evaluate(parts)
    trial.eval_seconds = time.monotonic() - start
    trial.eval_data = DataStats()
    for number, batch in enumerate(trial.eval_data.observe(parts.data.eval_loader)):
        if number + 1 >= parts.recipe.evaluation.batches:
            break
        del batch


def _trial_recipe(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with another folder; always watched, and evaluated only by `_evaluate`."""
    protection = recipe.protection.model_copy(
        update={
            "mode": "observe" if recipe.protection.mode == "off" else recipe.protection.mode,
            "policy": {"weights_every": _WEIGHTS_EVERY} | recipe.protection.policy,
        }
    )
    evaluation = recipe.evaluation.model_copy(update={"every": 0})
    return recipe.model_copy(update={"run_dir": str(folder), "evaluation": evaluation, "protection": protection})


def _facts(parts: RunParts) -> TrialFacts:
    vocab = parts.recipe.model.arguments.get("vocab")
    eval_loader = parts.data.eval_loader
    return TrialFacts(
        total=parts.total,
        parameters=parts.parameters,
        effective_batch=parts.effective_batch,
        lr=float(parts.schedules[0].base_lrs[0]),
        vocab=vocab if isinstance(vocab, int) else parts.data.vocab,
        embeddings=_embedding_names(parts.model),
        notes=list(parts.data.notes),
        unreadable=[],
        eval_batches=None if eval_loader is None else min(len(eval_loader), parts.recipe.evaluation.batches),
        workers=parts.data.train_loader.num_workers,
    )


def _embedding_names(model: nn.Module) -> frozenset[str]:
    weights = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    named = model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in named if id(parameter) in weights)
