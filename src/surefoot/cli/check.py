"""`surefoot check`: a short real trial, and the checklist answered."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer
from rich.console import Console

from surefoot.journal.strictjson import dumps
from surefoot.train import exits
from surefoot.train.recipe import Recipe, RecipeError, load


def show(
    source: str, overrides: Sequence[str], *, steps: int, seconds: float, patience: float, as_json: bool = False
) -> int:
    """Check a recipe, or each of a sweep; 1 when an item of any failed."""
    try:
        recipes = load(source, overrides)
    except RecipeError as error:
        typer.echo(f"surefoot check: {error}", err=True)
        return exits.USAGE
    from surefoot.train.check.checking import Wishes

    wishes = Wishes(steps=steps, seconds=seconds, patience=patience)
    return max(_one(recipe, wishes, as_json=as_json) for recipe in recipes)


def _one(recipe: Recipe, wishes: object, *, as_json: bool) -> int:
    from surefoot.train.check.checking import Wishes, check
    from surefoot.train.check.item import Report
    from surefoot.train.check.page import show as page

    assert isinstance(wishes, Wishes)

    def answer(report: Report) -> None:
        if not report.first:
            return
        if as_json:
            typer.echo(dumps(report.as_json()))
        else:
            page(report, Console(soft_wrap=False))

    def hung(report: Report) -> None:
        answer(report)
        sys.stdout.flush()
        os._exit(exits.FAILED)  # what stands still cannot be asked to end

    aside = Console(stderr=True)
    try:
        with exits.restartable(), aside.status(f"checking {recipe.name}") as status:
            report = check(recipe, wishes, tell=status.update, hung=hung)
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        code = exits.code_for(error, building=True)
        if code == exits.FAILED and not exits.out_of_memory(error):
            raise  # an error of the model's own code: its traceback says more than we could
        typer.echo(f"surefoot check: {exits.words_for(error)}", err=True)
        return code
    answer(report)
    return exits.FAILED if report.failed else exits.DONE
