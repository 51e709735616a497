"""The same command again: what it may change about a run that is there, and when it must not go on at all."""

from __future__ import annotations

import json
import os
from pathlib import Path

from surefoot.actions.stop import TrainingStopped
from surefoot.journal.lock import WriterLock
from surefoot.train import exits
from surefoot.train.recipe import Recipe, RecipeError, differences

_FREE = (
    "name",
    "run_dir",
    "steps",
    "epochs",
    "device",
    "log.",
    "sample.",
    "evaluation.",
    "checkpoints.",
    "protection.",
    "speed.",
    "parallel.",
    "data.workers",
    "data.prefetch",
    "data.bad_samples",
    "data.path",
    "data.held_out_path",
)
"""Keys that may be others when a run goes on: how long, how fast, how watched; files may have moved."""
_MOST = 4
"""Differences that are told."""


def check_again(recipe: Recipe, run_dir: Path) -> None:
    """Refuse to go on with a run of another recipe; after a restart by a launcher, with one that was stopped too."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") or 0) > 0:
        stopped = exits.was_stopped(run_dir)
        if stopped is not None:
            raise TrainingStopped(stopped)
    before = _before(run_dir)
    if before is None or not (run_dir / "checkpoints").exists():
        return
    changed = [each for each in differences(before, recipe) if not each[0].startswith(_FREE)]
    if changed:
        told = ", ".join(f"{key} was {was!r} and is {now!r}" for key, was, now in changed[:_MOST])
        more = f" and {len(changed) - _MOST} more" if len(changed) > _MOST else ""
        raise RecipeError(
            f"{run_dir} holds a run of another recipe: {told}{more}. To go on with that run, set them back; to "
            "begin a new one, choose another folder with run_dir=..."
        )


def check_free(run_dir: Path) -> None:
    """Refuse a folder that another process writes to, before anything long has begun; `attach` then takes it."""
    if run_dir.is_dir():
        WriterLock(run_dir).acquire().release()


def _before(run_dir: Path) -> dict[str, object] | None:
    """The recipe of the run that is there."""
    try:
        told = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
        return dict(told["recipe"]["resolved"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
