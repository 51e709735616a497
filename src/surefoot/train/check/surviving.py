"""Saving and going on, proven: a run broken off and taken up by fresh parts has the losses of one that was not."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.filesize import decimal

from surefoot.journal.reader import Run
from surefoot.parallel import World
from surefoot.train.check.item import Item, failed, ok, skipped, warning
from surefoot.train.check.rows import landed, steps
from surefoot.train.check.trial import Bound, Trial, attempt
from surefoot.train.recipe import Recipe

SAVED, PROVEN = "checkpoints", "resume"
CUT = 8
"""Updates before the break, and as many after it."""
_NEAR = 1e-3
"""How far losses may be apart, as a share, where the device does not add up in the same order each time."""
_KEPT = 3
"""Checkpoints that should fit on the disk."""


def needless(recipe: Recipe) -> Item | None:
    """A run that saves nothing has nothing to prove."""
    policy = recipe.protection.policy
    if policy == "protect":
        return None
    way = "Set protection.policy=protect, or save the run yourself."
    return warning(SAVED, f"with protection.policy={policy} nothing is saved, and a crash loses the run", way)


def saved(run: Run, recipe: Recipe, folder: Path) -> Item:
    """Whether the trial was saved, how large that is, and whether the disk has room."""
    told = [event for event in run.events if event["kind"] == "checkpoint"]
    wrong = [str(event.get("detail")) for event in told if event.get("name") == "failed"]
    if wrong:
        return failed(SAVED, f"could not be written: {wrong[0]}", "Choose another run_dir, or make room on its disk.")
    size = max((_size(each) for each in (folder / "checkpoints").glob("*") if each.is_dir()), default=0)
    if not size:
        return failed(SAVED, "none was written", "Choose a run_dir on a disk that can be written to.")
    free = shutil.disk_usage(folder).free
    pace = f"one every {recipe.checkpoints.every:,} updates and {recipe.checkpoints.seconds / 3600:.3g} h"
    found = f"{decimal(size)} each, {pace}, {decimal(free)} free on the disk"
    if free < _KEPT * size:
        return failed(SAVED, found, f"Make room for {_KEPT} of them at least, or choose another run_dir.", bytes=size)
    return ok(SAVED, found, bytes=size, free=free)


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def proven(whole: Trial, recipe: Recipe, world: World, folder: Path) -> Iterator[Item]:
    """Train up to the break in a folder of its own, go on with fresh parts, and compare; all processes do so."""
    cut = min(CUT, max(1, whole.steps // 4) if whole.cut else whole.steps // 2)
    if 2 * cut > whole.steps or cut < 1:
        yield skipped(PROVEN, "too few updates to break off and go on")
        return
    before = attempt(recipe, world, folder, Bound(updates=cut))
    after = attempt(recipe, world, folder, Bound(updates=2 * cut)) if before.error is None else before
    if not world.is_main or whole.run is None or after.run is None:
        return
    error = before.error or after.error
    if error is not None:
        way = "Try it by hand: train, interrupt, train again; the message says what cannot be saved."
        yield failed(PROVEN, f"broken off after {cut} updates, it did not go on: {error}", way)
        return
    yield _compared(whole.run, after.run, cut, exact=world.device.type == "cpu")


def _compared(whole: Run, parted: Run, cut: int, *, exact: bool) -> Item:
    if not any(event.get("name") == "resumed" for event in parted.events):
        way = "See checkpoints in the run's events; surefoot checkpoints RUN --verify reads them."
        return failed(PROVEN, "the fresh parts found no checkpoint to go on from", way)
    mine, theirs = (_losses(run, 2 * cut) for run in (whole, parted))
    if np.isnan(mine + theirs).any():
        way = "First get the trial through without trouble."
        return skipped(PROVEN, f"updates were refused among the first {2 * cut}, so there is no telling", way)
    apart = np.abs(mine - theirs) / np.maximum(np.abs(mine), 1e-12)
    limit = 0.0 if exact else _NEAR
    how = "to the bit" if exact else f"within {_NEAR:.1%}"
    figures = {"updates": 2 * cut, "cut": cut, "largest_difference": float(apart.max()), "tolerance": limit}
    if not (apart > limit).any():
        words = f"saved after {cut} updates and taken up by fresh parts, {cut} more have the same losses {how}"
        return ok(PROVEN, words, **figures)
    first = int(np.argmax(apart > limit))
    words = f"update {first}: loss {theirs[first]:.9g} instead of {mine[first]:.9g}"
    if first < cut:
        way = "Two runs from one seed differ. Set speed.deterministic=true, and draw random numbers from torch only."
        return warning(PROVEN, f"cannot be proven, since runs differ before any break, at {words}", way, **figures)
    way = (
        "Something that matters is in no state_dict: register it as a buffer of the model, give it a state_dict, or "
        "make the data depend on the sample's number only."
    )
    return failed(PROVEN, f"the run goes on differently after a save: {words}", way, **figures)


def _losses(run: Run, many: int) -> np.ndarray:
    """The losses of the first updates; NaN where one did not land."""
    found = dict(zip(steps(run).tolist(), landed(run, "loss").tolist(), strict=True))
    return np.array([found.get(step, np.nan) for step in range(many)])


def float32(recipe: Recipe, world: World, folder: Path) -> Item:
    """Whether the run could go on in float32, if its precision turns out not to do."""
    name, compute = "float32 to fall back on", recipe.precision.compute
    if compute in ("float32", "tf32"):
        return ok(name, f"the recipe computes in {compute} as it is")
    plain = recipe.precision.model_copy(update={"compute": "float32"})
    tried = attempt(recipe.model_copy(update={"precision": plain}), world, folder, Bound(updates=1))
    way = "Make batch.size smaller for it: precision.compute=float32 should work when nothing else does."
    if tried.error is not None:
        return failed(name, f"an update in float32 fails: {tried.error}", way)
    loss = landed(tried.run, "loss") if tried.run is not None else np.empty(0)
    if (world.is_main and not np.isfinite(loss).all()) or not tried.steps:
        return failed(name, "an update in float32 has no finite loss", "The precision is not to blame: see the data.")
    return ok(name, f"one update in float32 works, loss {loss[0]:.4f}" if len(loss) else "one update works")


def monitoring(trial: Trial, run: Run) -> Item:
    """Whether the journal holds what was trained, and can be read."""
    name = "monitoring"
    found = f"{run.scalars.rows} rows, {len(run.layers)} tensors, {len(run.events)} events read back"
    if run.skipped or run.notes or run.scalars.rows < trial.steps:
        more = "; ".join([f"{trial.steps} updates were made", f"{run.skipped} lines damaged", *run.notes])
        return failed(name, f"{found}; {more}", "See whether the disk of run_dir is full or slow.")
    return ok(name, found)
