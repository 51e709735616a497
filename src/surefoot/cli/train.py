"""`surefoot train`: a recipe, or one for each value of a sweep, to the end."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from surefoot.train import exits
from surefoot.train.recipe import RecipeError, load

if TYPE_CHECKING:
    from surefoot.train.ended import Ended

_AFTER_THE_FIRST = 3.0
"""Seconds."""


def show(source: str, overrides: Sequence[str], *, as_json: bool = False) -> int:
    """Train; the number to end with is that of the run that ended worst."""
    try:
        recipes = load(source, overrides)
    except RecipeError as error:
        _tell(str(error))
        return exits.USAGE
    from surefoot.train.session import Given, run

    worst = exits.DONE
    told = []
    for number, recipe in enumerate(recipes, 1):
        if len(recipes) > 1 and _first():
            typer.echo(f"\n{number} of {len(recipes)}", err=as_json)
        ended = run(recipe, Given(source, tuple(overrides), quiet=as_json))
        if ended.why and (ended.first or ended.code not in (exits.DONE, exits.RESTART)):
            _tell(ended.why)
        told.append(ended)
        if ended.code in (exits.RESTART, exits.USAGE):
            worst = ended.code  # the runs after it wait for a restart, or for a better recipe
            break
        worst = max(worst, ended.code)
    if told and told[0].first:
        if as_json:
            typer.echo(json.dumps([each.as_json() for each in told]))
        elif len(recipes) > 1:
            _compare(told)
    return worst


def _first() -> bool:
    """Whether this process speaks for all, as far as its launcher has told."""
    return os.environ.get("RANK", "0") == "0"


def _tell(why: str) -> None:
    """Processes that fail alike say so once: while the others wait for the first, its launcher ends them."""
    if not _first():
        time.sleep(_AFTER_THE_FIRST)
    typer.echo(f"surefoot train: {why}", err=True)


def _compare(told: Sequence[Ended]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("run", "updates", "loss", "held out", "took", "ended", box=None, pad_edge=False)
    for each in sorted(told, key=_rank):
        table.add_row(*each.as_row())
    Console().print(table)


def _rank(ended: Ended) -> tuple[bool, float]:
    """The lowest loss first; runs that have none come last."""
    loss = ended.loss if ended.held_out is None else ended.held_out
    return (loss is None or loss != loss, loss or 0.0)
