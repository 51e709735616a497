"""`surefoot check`: a short real trial, and the checklist answered."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.status import Status

from surefoot.journal.output_files import check_output
from surefoot.journal.strict_json import dumps
from surefoot.train import exits
from surefoot.train.recipe import Recipe, RecipeError, load

_PAUSE = 10.0
"""Seconds between two lines where there is no terminal."""


def show(
    source: str,
    overrides: Sequence[str],
    *,
    steps: int,
    seconds: float,
    patience: float,
    as_json: bool = False,
    schedule: Path | None = None,
    force: bool = False,
) -> int:
    """Check a recipe, or each of a sweep; 1 when an item of any failed. With `schedule` only its rate is drawn."""
    try:
        recipes = load(source, overrides)
    except RecipeError as error:
        typer.echo(f"surefoot check: {error}", err=True)
        return exits.USAGE
    if schedule is not None:
        return _drawn(recipes[0], schedule, source, force=force)
    from surefoot.train.check.checking import Wishes

    wishes = Wishes(steps=steps, seconds=seconds, patience=patience)
    return max(_one(recipe, wishes, as_json=as_json) for recipe in recipes)


def _drawn(recipe: Recipe, path: Path, source: str, *, force: bool) -> int:
    from surefoot import parallel
    from surefoot.train.build import planned
    from surefoot.train.schedules import draw, sparkline

    try:
        check_output(path, inputs=[source], force=force)
        rate, total = planned(recipe, parallel.init_distributed(recipe.device, recipe.parallel.timeout))
        drawn = draw(recipe.schedule, rate, total, path, inputs=[source], force=force)
    except (ValueError, OSError) as error:
        typer.echo(f"surefoot check: {error}", err=True)
        return exits.USAGE
    typer.echo(f"{recipe.schedule.name}, {total:,} updates, peak {rate:g}: {sparkline(recipe.schedule, rate, total)}")
    if not drawn:
        typer.echo(f"{path} was not drawn: matplotlib is missing, pip install 'surefoot[plots]'", err=True)
    return exits.DONE if drawn else exits.USAGE


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A live line on a terminal; elsewhere a line for each part, and one now and then."""
    aside = Console(stderr=True, highlight=False)
    if aside.is_terminal:
        live: list[Status] = []

        def update(words: str) -> None:  # begun by the first word, since only one process speaks
            if not live:
                live.append(aside.status(words))
                live[0].start()
            live[0].update(words)

        try:
            yield update
        finally:
            for each in live:
                each.stop()
        return
    due, part = 0.0, ""

    def line(words: str) -> None:
        nonlocal due, part
        if words.partition(":")[0] != part or time.monotonic() >= due:
            due, part = time.monotonic() + _PAUSE, words.partition(":")[0]
            aside.print(words)

    yield line


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

    try:
        with exits.restartable(), _progress() as tell:
            report = check(recipe, wishes, tell=tell, hung=hung)
    except (exits.ToldToEnd, KeyboardInterrupt) as error:
        came = str(error) if isinstance(error, exits.ToldToEnd) else "it was interrupted"
        typer.echo(f"surefoot check: {came} before the check was done; nothing of it is kept", err=True)
        return exits.FAILED
    except Exception as error:
        typer.echo(f"surefoot check: {exits.words_for(error)}", err=True)
        if exits.code_for(error, building=True) == exits.USAGE:
            return exits.USAGE
        if not exits.out_of_memory(error):
            traceback.print_exc()  # an error of the model's or the data's code: this says more than we could
        return exits.FAILED
    answer(report)
    return exits.FAILED if report.failed else exits.DONE
