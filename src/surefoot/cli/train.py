"""`surefoot train`: trains a recipe, or each recipe of a sweep."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from surefoot.train import exit_codes
from surefoot.train.recipe import RecipeError, load

if TYPE_CHECKING:
    from surefoot.train.result import RunResult

_DELAY_OF_OTHER_RANKS = 3.0
"""Seconds."""


def show(source: str, overrides: Sequence[str], *, as_json: bool = False) -> int:
    """Train; returns the exit code of the run that ended worst."""
    try:
        recipes = load(source, overrides)
    except RecipeError as error:
        _print_error(str(error))
        return exit_codes.USAGE
    from surefoot.train.session import Invocation, run

    worst = exit_codes.DONE
    results = []
    for number, recipe in enumerate(recipes, 1):
        if len(recipes) > 1 and _is_first_rank():
            typer.echo(f"\n{number} of {len(recipes)}", err=as_json)
        result = run(recipe, Invocation(source, tuple(overrides), quiet=as_json))
        if result.error and (result.is_first or result.code not in (exit_codes.DONE, exit_codes.RESTART)):
            _print_error(result.error)
        results.append(result)
        if result.code in (exit_codes.RESTART, exit_codes.USAGE):
            worst = result.code  # the runs after it wait for a restart, or for a corrected recipe
            break
        worst = max(worst, result.code)
    if results and results[0].is_first:
        if as_json:
            typer.echo(json.dumps([result.as_json() for result in results]))
        elif len(recipes) > 1:
            _print_comparison(results)
    return worst


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _print_error(message: str) -> None:
    """Other ranks wait first, so that an error they share is printed once: the launcher ends them meanwhile."""
    if not _is_first_rank():
        time.sleep(_DELAY_OF_OTHER_RANKS)
    typer.echo(f"surefoot train: {message}", err=True)


def _print_comparison(results: Sequence[RunResult]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("run", "updates", "loss", "eval loss", "time", "ended", box=None, pad_edge=False)
    for result in sorted(results, key=_sort_key):
        table.add_row(*result.as_table_row())
    Console().print(table)


def _sort_key(result: RunResult) -> tuple[bool, float]:
    """Lowest loss first; runs without a loss last."""
    loss = result.loss if result.eval_loss is None else result.eval_loss
    return (loss is None or loss != loss, loss or 0.0)
