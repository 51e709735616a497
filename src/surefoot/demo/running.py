"""One run of the demo's recipe through the engine, with faults planted and the story told."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

import surefoot
from surefoot import parallel
from surefoot.demo.faults import FAULTS, Weighed, plant
from surefoot.guard.attach import Guard
from surefoot.train.build import Parts, build
from surefoot.train.console import Console
from surefoot.train.ending import written
from surefoot.train.loop import train
from surefoot.train.recipe import load
from surefoot.train.session import Given, attached
from surefoot.train.sinks import Sinks
from surefoot.train.story import Say, Story
from surefoot.train.telling import Telling

SOURCE = "lm-tiny"
SIZE = (
    "model.width=96",
    "model.layers=2",
    "model.context=128",
    "data.context=128",
    "batch.size=12",
)
"""Smaller than the recipe as it is shipped: the demo trains it three times."""
PLAIN = ("schedule.name=constant", "protection.clip=null")
"""The three runs shall differ in nothing but faults and protection: clipping is a part of it, and a rate that is held
where it was should be compared with one that stays there."""
FIGURES = ("protection.figures.ring_every=20", "protection.figures.weights_every=1")
"""Those of a short run: by default a snapshot is taken every 50 updates and the weights are measured every 100."""
SAMPLE = ("sample.prompt=def __init__(self", "sample.tokens=500", "sample.temperature=0.9")
BARE = ("protection.policy=off", "sample.tokens=0")
LOSS = "loss=surefoot.demo.faults:mean_of_texts"
_DEAD = 20
"""Losses in a row that are no numbers, after which nobody waits any longer."""


class Dead(Exception):
    """Every weight is NaN."""


@dataclass
class Result:
    """What one run leaves behind."""

    losses: list[float] = field(default_factory=list)
    """Of every update of the loop."""
    evaluations: list[float] = field(default_factory=list)
    """Losses on text that it never saw."""
    acts: dict[int, str] = field(default_factory=dict)
    """What surefoot did, before which update of the loop."""
    updates: int = 0
    """That the schedule has come to: those that were taken back do not count."""
    text: str = ""
    """What the model writes in the end."""
    dead: bool = False

    @property
    def held_out(self) -> float:
        return self.evaluations[-1] if self.evaluations and not self.dead else math.nan


class Watching(Telling):
    """Hears of every update: plants what comes before the next one, and tells the story."""

    def __init__(self, parts: Parts, faults: Mapping[str, int], result: Result, say: Say) -> None:
        super().__init__(Console(parts.recipe, False, parts.total), Sinks({}), parts.total)
        self._parts, self._faults, self._result, self._say = parts, faults, result, say
        # What surefoot finds about the machine is no part of this story: a laptop has other things to do too.
        self._story = Story(say, counted="attempt", machine=False)
        result.acts = self._story.acts

    def listen(self, guard: Guard) -> None:
        guard.on_event(self._story.event)

    def updated(self, guard: Guard, tokens: int | None) -> None:
        super().updated(guard, tokens)
        if row := guard.latest:
            self._story.row(step=row.step, attempt=row.attempt, loss=row.loss)
        losses = self._result.losses
        made = len(losses)
        if made % (self._parts.total // 5) == 0:
            self._say(made - 1, "", f"loss {losses[-1]:.3f}", None)
        if all(map(math.isnan, losses[-_DEAD:])):
            raise Dead
        for name in (name for name, at in self._faults.items() if at == made):
            self._say(made, "planted", FAULTS[name].words, "red")
        plant(self._parts, self._faults, made)

    def evaluated(self, guard: Guard, step: int, loss: float | None) -> None:
        super().evaluated(guard, step, loss)
        self._result.evaluations.append(math.nan if loss is None else loss)


def overrides_of(steps: int, seed: int) -> tuple[str, ...]:
    """What the demo's recipe has other than the shipped one, as it is typed behind `surefoot train lm-tiny`."""
    length = (f"steps={steps}", f"seed={seed}", f"evaluation.every={max(1, steps // 10)}")
    # For so small a model more threads only wait for each other.
    return *SIZE, *PLAIN, LOSS, *length, *SAMPLE, "speed.threads=1"


def go(overrides: Sequence[str], faults: Mapping[str, int], say: Say) -> Result:
    """Train the recipe with these faults to its end, or to its death."""
    recipe = load(SOURCE, overrides)[0]
    world = parallel.init_distributed(recipe.device, recipe.parallel.timeout)
    parts = build(recipe, world)
    result = Result()
    batches = Weighed(parts.data.train_loader, faults.get("poison", -1))
    seen = replace(parts, loss=_noting(parts.loss, result.losses), data=replace(parts.data, train=cast(Any, batches)))
    with attached(parts, Given(SOURCE, tuple(overrides))) as guard:
        watching = Watching(parts, faults, result, say)
        watching.listen(guard)
        try:
            train(seen, guard, watching)
        except surefoot.TrainingStopped as why:
            say(len(result.losses), "stopped", str(why), "red")
        except Dead:
            result.dead = True
            words = f"still NaN after {_DEAD} updates: the bad number is in every weight, and nothing gets it out"
            say(len(result.losses) - 1, "dead", words, None)
    result.updates = parts.step
    if math.isfinite(result.held_out):
        result.text = written(parts).get("it writes", "").strip()
    return result


def _noting(loss: Callable[..., Any], losses: list[float]) -> Callable[..., Any]:
    """The same loss; those that are trained on are noted."""

    def noted(model: Any, batch: Any) -> Any:
        found = loss(model, batch)
        if torch.is_grad_enabled():
            losses.append(float(found.detach()))
        return found

    return noted
