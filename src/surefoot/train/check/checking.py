"""The checklist from top to bottom: a trial, then everything that can be told from it, then the proofs."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from surefoot import parallel
from surefoot.guard.validate import switched_off
from surefoot.parallel import World
from surefoot.train import exits
from surefoot.train.check import clipping, gradients, learning, resources, samples, surviving
from surefoot.train.check.item import Item, Report, failed, ok, skipped, warning
from surefoot.train.check.place import Place
from surefoot.train.check.stack import own_line
from surefoot.train.check.trial import Bound, Trial, attempt
from surefoot.train.check.watchdog import Watchdog
from surefoot.train.recipe import Recipe, RecipeError, remarks

RUNS, MOVES = "the trial", "no standstill"


@dataclass(frozen=True, slots=True)
class Wishes:
    """How thorough a check is."""

    steps: int = 100
    seconds: float = 60.0
    """The longest time that the trial trains."""
    patience: float = 600.0
    """Seconds without an update after which it counts as hung."""


def check(
    recipe: Recipe,
    wishes: Wishes,
    *,
    tell: Callable[[str], None] = lambda words: None,
    hung: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Answer the checklist for a recipe; an error before the first update is raised, as `surefoot train` has it.

    `tell` hears how far it is. `hung` is called from another thread, with what is known, when nothing moves any more.
    """
    if switched_off():
        raise RecipeError("SUREFOOT=off is set in the environment, so nothing would be measured: unset it to check")
    world = parallel.init_distributed(recipe.device, recipe.parallel.timeout)
    report = Report(recipe.name, [], first=world.is_main)
    say = tell if world.is_main else lambda words: None
    place = Place(recipe, world)

    def stands_still(words: str) -> None:
        way = "See what that line waits for: a lock, a queue, a worker of the data, a process that went another way."
        report.items.append(failed(MOVES, words, way))
        place.remove()
        hung(report)

    whole = False
    try:
        with Watchdog(wishes.patience, stands_still) as dog, place as folder:
            for item in _answers(recipe, wishes, world, folder, dog, say):
                report.items.append(item)
        whole = True
    finally:
        parallel.shutdown(world, failed=not whole)
    return report


def _answers(
    recipe: Recipe, wishes: Wishes, world: World, folder: Path, dog: Watchdog, tell: Callable[[str], None]
) -> Iterator[Item]:
    def moved(step: int, loss: float | None) -> None:
        dog.beat(f"update {step + 1} of the trial")
        tell(f"trial: update {step} of {wishes.steps}" + ("" if loss is None else f", loss {loss:.4f}"))

    yield _fits(recipe, parallel.check_versions(world))
    tell("building the model, opening the data")
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
    began = time.monotonic()
    bound = Bound(updates=wishes.steps, seconds=wishes.seconds, tell=moved)
    trial = attempt(recipe, world, folder / "trial", bound, look=True)
    yield _ran(trial, time.monotonic() - began)
    if trial.run is not None:
        yield ok(MOVES, f"the longest pause was {dog.longest:.1f} s", longest=dog.longest)
        yield from _told(trial, recipe, world)
    dog.beat("save and resume")
    _empty(world)
    tell("breaking off, and going on with fresh parts")
    unsaved = surviving.needless(recipe)
    if unsaved is not None:
        yield unsaved
    elif trial.error is not None:
        yield skipped(surviving.PROVEN, "the trial did not come through", "First get it through.")
    else:
        if trial.run is not None:
            yield surviving.saved(trial.run, recipe, folder / "trial")
        yield from surviving.proven(trial, recipe, world, folder / "parted")
    dog.beat("an update in float32")
    _empty(world)
    tell("an update in float32")
    yield surviving.float32(recipe, world, folder / "float32")


def _told(trial: Trial, recipe: Recipe, world: World) -> Iterator[Item]:
    """What can be told from the journal and the samples of the trial."""
    run = trial.run
    assert run is not None
    yield from resources.answers(trial, run, recipe, world)
    yield from learning.answers(trial, run)
    yield gradients.answer(trial, run)
    yield clipping.answer(recipe, run)
    yield from samples.answers(trial)
    yield surviving.monitoring(trial, run)


def _fits(recipe: Recipe, odd: list[str]) -> Item:
    """What stands in the recipe, or differs between processes, and is not wrong but strange."""
    strange = [*odd, *remarks(recipe)]
    if strange:
        return warning("the recipe", "; ".join(strange), "Change it, or be sure that it is meant so.")
    return ok("the recipe", "its parts fit together")


def _ran(trial: Trial, seconds: float) -> Item:
    made = f"{trial.steps} of {trial.wanted} updates in {seconds:.1f} s"
    error = trial.error
    if error is None:
        cut = ": time was up, --seconds gives it more" if trial.cut else ""
        return ok(RUNS, made + cut, updates=trial.steps, parameters=trial.facts.parameters)
    words = exits.words_for(error)
    if exits.out_of_memory(error) or exits.code_for(error) == exits.LEAVE:
        return failed(RUNS, f"ended after {made}", words)
    where = own_line(traceback.extract_tb(error.__traceback__))
    way = "The code at that line, or what it was fed, has to change: see the items on data below."
    return failed(RUNS, f"ended after {made} by {type(error).__name__}: {error} (at {where})", way)


def _empty(world: World) -> None:
    """Let go of a trial's memory before the next one is built."""
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
