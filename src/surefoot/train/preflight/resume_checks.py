"""Checks of checkpoints, exact resume, the float32 fallback and the journal."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.filesize import decimal

from surefoot.journal.reader import Run
from surefoot.parallel import World
from surefoot.records import Action
from surefoot.train.preflight.journal_columns import applied, applied_steps
from surefoot.train.preflight.report import CheckItem, failed, ok, skipped, warning
from surefoot.train.preflight.trial import ShortRun, TrialLimit, run_trial
from surefoot.train.recipe import Recipe

CHECKPOINTS, RESUME = "checkpoints", "resume"
INTERRUPT_AFTER = 8
"""Updates before the interruption, and as many after it."""
_TOLERANCE = 1e-3
"""Relative difference of losses allowed on devices that do not sum in the same order each time."""
_CHECKPOINTS_TO_FIT = 3
"""Checkpoints that should fit on the disk."""


def not_saved(recipe: Recipe) -> CheckItem | None:
    """A warning for a run that is not saved, so has nothing to resume."""
    mode = recipe.protection.mode
    if mode == "protect":
        return None
    fix = "Set protection.mode=protect, or save the run yourself."
    return warning(CHECKPOINTS, f"with protection.mode={mode} nothing is saved, and a crash loses the run", fix)


def checkpoints(run: Run, recipe: Recipe, folder: Path) -> CheckItem:
    """Whether the trial was saved, how large a checkpoint is, and whether the disk has room."""
    events = [event for event in run.events if event["kind"] == "checkpoint"]
    failures = [str(event.get("detail")) for event in events if event.get("name") == "failed"]
    if failures:
        fix = "Choose another run_dir, or free space on its disk."
        return failed(CHECKPOINTS, f"could not be written: {failures[0]}", fix)
    size = max((_folder_size(path) for path in (folder / "checkpoints").glob("*") if path.is_dir()), default=0)
    if not size:
        return failed(CHECKPOINTS, "none was written", "Choose a run_dir on a writable disk.")
    free = shutil.disk_usage(folder).free
    interval = f"every {recipe.checkpoints.every:,} updates or {recipe.checkpoints.seconds / 3600:.3g} h"
    message = f"{decimal(size)} each, {interval}, {decimal(free)} free on the disk"
    if free < _CHECKPOINTS_TO_FIT * size:
        fix = f"Free space for at least {_CHECKPOINTS_TO_FIT} of them, or choose another run_dir."
        return failed(CHECKPOINTS, message, fix, bytes=size)
    return ok(CHECKPOINTS, message, bytes=size, free=free)


def _folder_size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def resume(uninterrupted: ShortRun, recipe: Recipe, world: World, folder: Path) -> Iterator[CheckItem]:
    """Interrupt a second trial, resume it with fresh parts and compare its losses; every rank takes part."""
    steps = uninterrupted.steps
    cut = min(INTERRUPT_AFTER, max(1, steps // 4) if uninterrupted.timed_out else steps // 2)
    if 2 * cut > steps or cut < 1:
        yield skipped(RESUME, "too few updates to interrupt and resume")
        return
    before = run_trial(recipe, world, folder, TrialLimit(updates=cut))
    after = run_trial(recipe, world, folder, TrialLimit(updates=2 * cut)) if before.error is None else before
    if not world.is_main or uninterrupted.run is None or after.run is None:
        return
    error = before.error or after.error
    if error is not None:
        fix = "Try it by hand: train, interrupt, train again; the message says what cannot be saved."
        yield failed(RESUME, f"interrupted after {cut} updates, it did not resume: {error}", fix)
        return
    yield _compare(uninterrupted.run, after.run, cut, exact=world.device.type == "cpu")


def _compare(uninterrupted: Run, resumed: Run, cut: int, *, exact: bool) -> CheckItem:
    if not any(event.get("name") == "resumed" for event in resumed.events):
        fix = "See the checkpoint events of the run; `surefoot checkpoints verify RUN` reads its checkpoints."
        return failed(RESUME, "no checkpoint to resume from was found", fix)
    if _was_rewound(uninterrupted) or _was_rewound(resumed):
        return skipped(RESUME, "a trial was rewound, so losses cannot be compared", "Fix the trial first.")
    expected, actual = (_losses(run, 2 * cut) for run in (uninterrupted, resumed))
    if np.isnan(expected + actual).any():
        message = f"updates were refused among the first {2 * cut}, so losses cannot be compared"
        return skipped(RESUME, message, "Fix the trial first.")
    difference = np.abs(expected - actual) / np.maximum(np.abs(expected), 1e-12)
    tolerance = 0.0 if exact else _TOLERANCE
    precision = "bit for bit" if exact else f"within {_TOLERANCE:.1%}"
    values = {
        "updates": 2 * cut,
        "cut": cut,
        "largest_difference": float(difference.max()),
        "tolerance": tolerance,
    }
    if not (difference > tolerance).any():
        message = f"resumed with fresh parts after {cut} updates, the next {cut} have the same losses {precision}"
        return ok(RESUME, message, **values)
    first = int(np.argmax(difference > tolerance))
    where = f"update {first}: loss {actual[first]:.9g} instead of {expected[first]:.9g}"
    if first < cut:
        fix = "Two runs with one seed differ. Set speed.deterministic=true, and draw random numbers from torch only."
        message = f"cannot be tested, because two runs differ before any interruption, at {where}"
        return warning(RESUME, message, fix, **values)
    fix = (
        "Something that matters is in no state_dict: register it as a buffer of the model, give it a state_dict, or "
        "make the data depend on the sample's index only."
    )
    return failed(RESUME, f"the resumed run differs: {where}", fix, **values)


def _was_rewound(run: Run) -> bool:
    return any(event["kind"] == "decision" and event["action"] == Action.REWIND for event in run.events)


def _losses(run: Run, count: int) -> np.ndarray:
    """The losses of the first updates; NaN where one was not applied."""
    by_step = dict(zip(applied_steps(run).tolist(), applied(run, "loss").tolist(), strict=True))
    return np.array([by_step.get(step, np.nan) for step in range(count)])


def float32_fallback(recipe: Recipe, world: World, folder: Path) -> CheckItem:
    """Whether the run could continue in float32 if its precision turns out to be too low."""
    name, compute = "float32 fallback", recipe.precision.compute
    if compute in ("float32", "tf32"):
        return ok(name, f"the recipe already computes in {compute}")
    precision = recipe.precision.model_copy(update={"compute": "float32"})
    trial = run_trial(recipe.model_copy(update={"precision": precision}), world, folder, TrialLimit(updates=1))
    fix = "Lower batch.size for it: precision.compute=float32 should work when nothing else does."
    if trial.error is not None:
        return failed(name, f"an update in float32 fails: {trial.error}", fix)
    losses = applied(trial.run, "loss") if trial.run is not None else np.empty(0)
    if (world.is_main and not np.isfinite(losses).all()) or not trial.steps:
        return failed(name, "an update in float32 has no finite loss", "Precision is not the cause: check the data.")
    return ok(name, f"one update in float32 works, loss {losses[0]:.4f}" if len(losses) else "one update works")


def monitoring(trial: ShortRun, run: Run) -> CheckItem:
    """Whether the journal is complete and readable."""
    name = "monitoring"
    message = f"{run.scalars.rows} rows, {len(run.layers)} tensors, {len(run.events)} events read back"
    if run.skipped or run.notes or run.scalars.rows < trial.steps:
        details = "; ".join([f"{trial.steps} updates were made", f"{run.skipped} lines damaged", *run.notes])
        return failed(name, f"{message}; {details}", "See whether the disk of run_dir is full or slow.")
    return ok(name, message)
