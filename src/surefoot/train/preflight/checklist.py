"""The checklist, top to bottom: a trial run, the items derived from it, then the resume and float32 tests."""

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
from surefoot.train import exit_codes
from surefoot.train.preflight import data_checks, loop_checks, resource_checks, resume_checks, training_checks
from surefoot.train.preflight.report import CheckItem, CheckReport, failed, ok, skipped, warning
from surefoot.train.preflight.trial import ShortRun, TrialFolder, TrialLimit, run_trial
from surefoot.train.preflight.watchdog import Watchdog, user_line
from surefoot.train.recipe import Recipe, RecipeError, remarks

TRIAL, NO_HANG = "trial run", "no hang"


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """How thorough a check is."""

    steps: int = 100
    seconds: float = 60.0
    """Longest training time of the trial."""
    patience: float = 600.0
    """Seconds without an update after which the trial counts as hung."""


def check(
    recipe: Recipe,
    options: CheckOptions,
    *,
    on_progress: Callable[[str], None] = lambda message: None,
    on_hang: Callable[[CheckReport], None] = lambda report: None,
) -> CheckReport:
    """Answer the checklist for a recipe; an error before the first update is raised, as by `surefoot train`.

    `on_hang` is called from another thread with the report so far when the trial hangs.
    """
    if switched_off():
        raise RecipeError("SUREFOOT=off is set in the environment, so nothing would be measured: unset it to check")
    world = parallel.init_distributed(recipe.device, recipe.parallel.timeout)
    report = CheckReport(recipe.name, [], is_first=world.is_main)
    progress = on_progress if world.is_main else lambda message: None
    trial_folder = TrialFolder(recipe, world)

    def hung(message: str) -> None:
        fix = "See what that line waits for: a lock, a queue, a data worker, a rank that took another branch."
        report.items.append(failed(NO_HANG, message, fix))
        trial_folder.remove()
        on_hang(report)

    complete = False
    try:
        with Watchdog(options.patience, hung) as watchdog, trial_folder as folder:
            for item in _items(recipe, options, world, folder, watchdog, progress):
                report.items.append(item)
        complete = True
    finally:
        parallel.shutdown(world, failed=not complete)
    return report


def _items(
    recipe: Recipe,
    options: CheckOptions,
    world: World,
    folder: Path,
    watchdog: Watchdog,
    progress: Callable[[str], None],
) -> Iterator[CheckItem]:
    def on_update(step: int, loss: float | None) -> None:
        watchdog.beat(f"update {step + 1} of the trial")
        progress(f"trial: update {step} of {options.steps}" + ("" if loss is None else f", loss {loss:.4f}"))

    yield _recipe_item(recipe, parallel.check_versions(world))
    progress("building the model, opening the data")
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(world.device)
    start = time.monotonic()
    limit = TrialLimit(updates=options.steps, seconds=options.seconds, on_update=on_update)
    trial = run_trial(recipe, world, folder / "trial", limit, inspect_data=True)
    yield _trial_item(trial, time.monotonic() - start)
    if trial.run is not None:
        yield ok(NO_HANG, f"the longest pause was {watchdog.longest_pause:.1f} s", longest=watchdog.longest_pause)
        yield from _journal_items(trial, recipe, world)
    if trial.error is None:
        watchdog.beat("checks of the training loop")
        _free_memory(world)
        progress("checking the training loop")
        yield from loop_checks.items(recipe, world)
    watchdog.beat("save and resume")
    _free_memory(world)
    progress("interrupting the run and resuming it with fresh parts")
    not_saved = resume_checks.not_saved(recipe)
    if not_saved is not None:
        yield not_saved
    elif trial.error is not None:
        yield skipped(resume_checks.RESUME, "the trial failed", "Fix the trial first.")
    else:
        if trial.run is not None:
            yield resume_checks.checkpoints(trial.run, recipe, folder / "trial")
        yield from resume_checks.resume(trial, recipe, world, folder / "parted")
    watchdog.beat("an update in float32")
    _free_memory(world)
    progress("an update in float32")
    yield resume_checks.float32_fallback(recipe, world, folder / "float32")


def _journal_items(trial: ShortRun, recipe: Recipe, world: World) -> Iterator[CheckItem]:
    """Answers from the trial's journal and samples."""
    run = trial.run
    assert run is not None
    yield from resource_checks.items(trial, run, recipe, world)
    yield from training_checks.items(trial, run, recipe)
    yield from data_checks.items(trial)
    yield resume_checks.monitoring(trial, run)


def _recipe_item(recipe: Recipe, inconsistencies: list[str]) -> CheckItem:
    """Settings that are valid but unusual, or that differ between ranks."""
    unusual = [*inconsistencies, *remarks(recipe)]
    if unusual:
        return warning("recipe", "; ".join(unusual), "Change it, unless it is intended.")
    return ok("recipe", "its settings fit together")


def _trial_item(trial: ShortRun, seconds: float) -> CheckItem:
    updates = f"{trial.steps} of {trial.wanted} updates in {seconds:.1f} s"
    error = trial.error
    if error is None:
        hint = ": time was up, raise --seconds for more" if trial.timed_out else ""
        return ok(TRIAL, updates + hint, updates=trial.steps, parameters=trial.facts.parameters)
    message = exit_codes.message_for(error)
    if exit_codes.is_out_of_memory(error) or exit_codes.code_for(error) == exit_codes.DO_NOT_RESTART:
        return failed(TRIAL, f"ended after {updates}", message)
    line = user_line(traceback.extract_tb(error.__traceback__))
    fix = "Fix the code at that line, or the data it was given: see the data items below."
    return failed(TRIAL, f"ended after {updates} with {type(error).__name__}: {error} (at {line})", fix)


def _free_memory(world: World) -> None:
    """Free a trial's memory before the next one is built."""
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
