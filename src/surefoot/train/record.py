"""What a run of the engine adds to its `run.json`, so that it can be told later what was run, and run again."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from surefoot.guard.run_info import extra_run_info
from surefoot.train.recipe.dumping import as_plain
from surefoot.train.recipe.loading import find
from surefoot.train.recipe.mistakes import RecipeError
from surefoot.train.recipe.schema import Recipe

_LONGEST = 100_000
"""Bytes of a recipe's file that are kept as they are."""


class Described(Protocol):
    """What is known of data once it is open; see `surefoot.data.corpus`."""

    @property
    def hash(self) -> str | None: ...
    @property
    def samples(self) -> int | None: ...
    @property
    def tokens(self) -> int | None: ...


def recorded(
    recipe: Recipe,
    *,
    source: str,
    overrides: Sequence[str] = (),
    data: Described | None = None,
    effective_batch: int | None = None,
) -> AbstractContextManager[None]:
    """Whatever is attached in here writes into its `run.json` the recipe as given and as run, the data and the seed.

    Attaching adds the rest: code version, environment, number of processes, optimizer, policy and surefoot's version.
    """
    told: dict[str, Any] = {
        "recipe": {"source": source, "text": _text(source), "overrides": list(overrides), "resolved": as_plain(recipe)},
        "seeds": {"recipe": recipe.seed},
    }
    if data is not None:
        told["data"] = {"hash": data.hash, "samples": data.samples, "tokens": data.tokens}
    if effective_batch is not None:
        told["config"] = {"effective_batch": effective_batch}
    return extra_run_info(told)


def _text(source: str) -> str | None:
    """The recipe's file as it stands; None where it can no longer be read."""
    try:
        with find(source).open("rb") as file:
            return file.read(_LONGEST).decode("utf-8", "replace")
    except (OSError, RecipeError):
        return None
