"""A part of a run, really trained: the recipe's own model, data and settings, in a folder that is thrown away."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from torch import nn

from surefoot import parallel
from surefoot.data.data_error import UnreadableSample
from surefoot.guard.attach import Guard
from surefoot.journal.reader import Run, read
from surefoot.parallel import World
from surefoot.train.build import Parts, build
from surefoot.train.check.seen import Seen
from surefoot.train.loop import evaluate, train
from surefoot.train.recipe import Recipe, RecipeError
from surefoot.train.session import Given, attached

_ASK_EVERY = 5
"""Updates between two looks at the clock, where many processes take them together."""


_WEIGHTS_EVERY = 10
"""Updates between two looks at how far the weights move, which a long run takes less often."""


class Enough(Exception):
    """The time for a trial is over."""


@dataclass(slots=True)
class Facts:
    """What is known of a trial's parts once they are made."""

    total: int
    parameters: int
    effective_batch: int
    rate: float
    vocab: int | None
    embeddings: frozenset[str]
    """Tensors of which only the rows in use have a gradient."""
    notes: list[str]
    unreadable: list[UnreadableSample]
    held_out_batches: int | None


@dataclass(slots=True)
class Trial:
    """What came of it."""

    facts: Facts
    seen: Seen = field(default_factory=Seen)
    held_out: Seen | None = None
    held_out_loss: float | None = None
    evaluation_seconds: float = 0.0
    steps: int = 0
    wanted: int = 0
    cut: bool = False
    """Whether time ran out first."""
    error: BaseException | None = None
    """What ended it early."""
    run: Run | None = None
    """Its journal, read back."""


@dataclass(slots=True, kw_only=True)
class Bound:
    """How far a trial goes, and whom it tells."""

    updates: int
    seconds: float = float("inf")
    tell: Callable[[int, float | None], None] = lambda step, loss: None


class _Ear:
    """Listens to the loop: tells how far it is, and ends it when time is up."""

    def __init__(self, parts: Parts, bound: Bound) -> None:
        self._parts, self._bound = parts, bound
        self._began = time.monotonic()

    def updated(self, guard: Guard, tokens: int | None) -> None:
        if tokens is not None:
            guard.report(tokens=tokens)
        latest = guard.latest
        self._bound.tell(self._parts.step, None if latest is None else latest.loss)
        world, bound = self._parts.world, self._bound.seconds
        if bound < float("inf") and (world.size == 1 or self._parts.step % _ASK_EVERY == 0):
            over = time.monotonic() - self._began > bound
            if parallel.all_reduce_sum(world, int(over)):
                raise Enough

    def evaluated(self, guard: Guard, step: int, loss: float | None) -> None:
        pass


class _Passing:
    """The loader as the loop sees it: its first round is looked at."""

    def __init__(self, loader: Any, seen: Seen) -> None:
        self._loader, self._seen, self._round = loader, seen, 0

    def __iter__(self) -> Any:
        self._round += 1
        return self._seen.passing(self._loader) if self._round == 1 else iter(self._loader)


def attempt(recipe: Recipe, world: World, folder: Path, bound: Bound, *, look: bool = False) -> Trial:
    """Train to an update with whatever the folder holds, and read back what was written.

    An error before the first update is the recipe's and is raised; one during training is part of the answer.
    """
    parts = build(_short(recipe, folder), world)
    trial = Trial(facts_of(parts))
    trial.wanted = min(bound.updates, parts.total)
    seen = cast(Any, _Passing(parts.data.train_loader, trial.seen)) if look else parts.data.train_loader
    limited = replace(parts, total=trial.wanted, data=replace(parts.data, train=seen))
    try:
        with attached(parts, Given("check")) as guard:
            try:
                train(limited, guard, _Ear(parts, bound))
            except Enough:
                trial.cut = True
            if look:
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


def _evaluate(parts: Parts, trial: Trial) -> None:
    if parts.data.eval_loader is None:
        return
    began = time.monotonic()
    trial.held_out_loss = evaluate(parts)
    trial.evaluation_seconds = time.monotonic() - began
    trial.held_out = Seen()
    for number, batch in enumerate(trial.held_out.passing(parts.data.eval_loader)):
        if number + 1 >= parts.recipe.evaluation.batches:
            break
        del batch


def _short(recipe: Recipe, folder: Path) -> Recipe:
    """The same recipe, kept elsewhere; it is always watched, and evaluated only when we say so."""
    given = recipe.protection
    watched = {
        "policy": "observe" if given.policy == "off" else given.policy,
        "figures": {"weights_every": _WEIGHTS_EVERY} | given.figures,
    }
    protection = given.model_copy(update=watched)
    evaluation = recipe.evaluation.model_copy(update={"every": 0})
    return recipe.model_copy(update={"run_dir": str(folder), "evaluation": evaluation, "protection": protection})


def facts_of(parts: Parts) -> Facts:
    vocab = parts.recipe.model.arguments.get("vocab")
    held_out = parts.data.eval_loader
    return Facts(
        total=parts.total,
        parameters=parts.parameters,
        effective_batch=parts.effective_batch,
        rate=float(parts.schedules[0].base_lrs[0]),
        vocab=vocab if isinstance(vocab, int) else parts.data.vocab,
        embeddings=_embeddings(parts.model),
        notes=list(parts.data.notes),
        unreadable=[],
        held_out_batches=None if held_out is None else min(len(held_out), parts.recipe.evaluation.batches),
    )


def _embeddings(model: nn.Module) -> frozenset[str]:
    shared = {id(each.weight) for each in model.modules() if isinstance(each, nn.Embedding)}
    named = model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, parameter in named if id(parameter) in shared)
