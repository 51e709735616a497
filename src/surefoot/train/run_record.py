"""The recipe in a run's `run.json`: written when a run starts, compared when the same command runs again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from surefoot.actions.stop import TrainingStopped
from surefoot.journal.lock import WriterLock
from surefoot.train import exit_codes
from surefoot.train.recipe import Recipe, RecipeError, as_plain, differences
from surefoot.train.recipe.load_recipe import find_recipe

_MAX_TEXT_BYTES = 100_000
"""How much of a recipe's file is stored verbatim."""
_CHANGEABLE = (
    "name",
    "run_dir",
    "steps",
    "epochs",
    "device",
    "log.",
    "alarms",
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
"""Keys that may change when a run is resumed: how long, how fast, how protected; data files may have moved."""
_SHOWN_DIFFERENCES = 4


class DataFacts(Protocol):
    """What is recorded of the data; see `surefoot.data.corpus`."""

    @property
    def hash(self) -> str | None: ...
    @property
    def samples(self) -> int | None: ...
    @property
    def tokens(self) -> int | None: ...


def run_record(
    recipe: Recipe,
    *,
    source: str,
    overrides: Sequence[str] = (),
    data: DataFacts | None = None,
    effective_batch: int | None = None,
) -> dict[str, Any]:
    """What `attach` adds to `run.json`: the recipe as given and as resolved, the data and the seed.

    `attach` itself records the rest: code version, environment, number of ranks, optimizer, policy and surefoot's
    version.
    """
    record: dict[str, Any] = {
        "recipe": {
            "source": source,
            "text": _source_text(source),
            "overrides": list(overrides),
            "resolved": as_plain(recipe),
        },
        "seeds": {"recipe": recipe.seed},
    }
    if data is not None:
        record["data"] = {"hash": data.hash, "samples": data.samples, "tokens": data.tokens}
    if effective_batch is not None:
        record["config"] = {"effective_batch": effective_batch}
    return record


def check_resumable(recipe: Recipe, run_dir: Path) -> None:
    """Refuse to resume a run of another recipe; after a restart by a launcher, also one that surefoot stopped."""
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") or 0) > 0:
        stop_reason = exit_codes.why_stopped(run_dir)
        if stop_reason is not None:
            raise TrainingStopped(stop_reason)
    before = _recorded_recipe(run_dir)
    if before is None or not (run_dir / "checkpoints").exists():
        return
    changed = [change for change in differences(before, recipe) if not change[0].startswith(_CHANGEABLE)]
    if _samples(before) == recipe.batch.size * recipe.batch.accumulate:  # in other micro-batches
        changed = [change for change in changed if not change[0].startswith("batch.")]
    if changed:
        shown = ", ".join(f"{key} was {old!r} and is now {new!r}" for key, old, new in changed[:_SHOWN_DIFFERENCES])
        more = f" and {len(changed) - _SHOWN_DIFFERENCES} more" if len(changed) > _SHOWN_DIFFERENCES else ""
        raise RecipeError(
            f"{run_dir} holds a run of another recipe: {shown}{more}. To resume that run, change them back; to start "
            "a new run, choose another folder with run_dir=..."
        )


def check_not_in_use(run_dir: Path) -> None:
    """Refuse a run directory that another process writes to, before anything slow starts; `attach` then locks it."""
    if run_dir.is_dir():
        WriterLock(run_dir).acquire().release()


def _samples(recipe: Mapping[str, Any]) -> int | None:
    """Samples per update and rank of a recorded recipe."""
    batch = recipe.get("batch")
    if not isinstance(batch, Mapping):
        return None
    size, accumulate = batch.get("size"), batch.get("accumulate")
    return size * accumulate if isinstance(size, int) and isinstance(accumulate, int) else None


def _recorded_recipe(run_dir: Path) -> dict[str, object] | None:
    """The resolved recipe of the run in this directory."""
    try:
        info = json.loads((run_dir / "run.json").read_text(encoding="utf-8"))
        return dict(info["recipe"]["resolved"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _source_text(source: str) -> str | None:
    """The recipe's file verbatim; None where it can no longer be read."""
    try:
        with find_recipe(source).open("rb") as file:
            return file.read(_MAX_TEXT_BYTES).decode("utf-8", "replace")
    except (OSError, RecipeError):
        return None
