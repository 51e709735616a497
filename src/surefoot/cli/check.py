"""`surefoot check`: runs the checklist with progress on the console and prints its report."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.status import Status

from surefoot.journal.output_files import check_output
from surefoot.journal.strict_json import dumps
from surefoot.train import exit_codes
from surefoot.train.recipe import Recipe, RecipeError, load

if TYPE_CHECKING:
    from surefoot.train.preflight.checklist import CheckOptions

_LINE_INTERVAL = 10.0
"""Seconds between two progress lines without a terminal."""


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
    """Check a recipe, or each of a sweep, or a script; 1 when an item failed. With `schedule` only plot its lr."""
    if source.endswith(".py"):
        from surefoot.cli.check_script import show_script

        return show_script(source, overrides, as_json=as_json)
    try:
        recipes = load(source, overrides)
    except RecipeError as error:
        typer.echo(f"surefoot check: {error}", err=True)
        return exit_codes.USAGE
    if schedule is not None:
        return _plot_schedule(recipes[0], schedule, source, force=force)
    from surefoot.train.preflight.checklist import CheckOptions

    options = CheckOptions(steps=steps, seconds=seconds, patience=patience)
    return max(_check(recipe, options, as_json=as_json) for recipe in recipes)


def _plot_schedule(recipe: Recipe, path: Path, source: str, *, force: bool) -> int:
    from surefoot import parallel
    from surefoot.train.build import peak_lr_and_steps
    from surefoot.train.schedules import plot_schedule, sparkline

    try:
        check_output(path, inputs=[source], force=force)
        lr, total = peak_lr_and_steps(recipe, parallel.init_distributed(recipe.device, recipe.parallel.timeout))
        plotted = plot_schedule(recipe.schedule, lr, total, path, inputs=[source], force=force)
    except (ValueError, OSError) as error:
        typer.echo(f"surefoot check: {error}", err=True)
        return exit_codes.USAGE
    typer.echo(f"{recipe.schedule.name}, {total:,} updates, peak {lr:g}: {sparkline(recipe.schedule, lr, total)}")
    if not plotted:
        typer.echo(f"{path} was not written: matplotlib is missing, pip install 'surefoot[plots]'", err=True)
    return exit_codes.DONE if plotted else exit_codes.USAGE


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A live line on a terminal; elsewhere a line per phase, and one every 10 s."""
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        live: list[Status] = []

        def update(message: str) -> None:  # started by the first message, because only one rank reports
            if not live:
                live.append(console.status(message))
                live[0].start()
            live[0].update(message)

        try:
            yield update
        finally:
            for status in live:
                status.stop()
        return
    next_line, phase = 0.0, ""

    def line(message: str) -> None:
        nonlocal next_line, phase
        if message.partition(":")[0] != phase or time.monotonic() >= next_line:
            next_line, phase = time.monotonic() + _LINE_INTERVAL, message.partition(":")[0]
            console.print(message)

    yield line


def _check(recipe: Recipe, options: CheckOptions, *, as_json: bool) -> int:
    from surefoot.train.preflight.checklist import check
    from surefoot.train.preflight.report import CheckReport, print_report

    def print_it(report: CheckReport) -> None:
        if not report.is_first:
            return
        if as_json:
            typer.echo(dumps(report.as_json()))
        else:
            print_report(report, Console(soft_wrap=False))

    def on_hang(report: CheckReport) -> None:
        print_it(report)
        sys.stdout.flush()
        for worker in multiprocessing.active_children():  # one that reads data may be what hangs
            worker.kill()
        os._exit(exit_codes.FAILED)  # a hung main thread cannot end itself

    try:
        with exit_codes.restartable(), _progress() as progress:
            report = check(recipe, options, on_progress=progress, on_hang=on_hang)
    except (exit_codes.ReceivedSignal, KeyboardInterrupt) as error:
        reason = str(error) if isinstance(error, exit_codes.ReceivedSignal) else "interrupted"
        typer.echo(f"surefoot check: {reason} before the check was complete; nothing of it is kept", err=True)
        return exit_codes.FAILED
    except Exception as error:
        typer.echo(f"surefoot check: {exit_codes.message_for(error)}", err=True)
        if exit_codes.code_for(error, building=True) == exit_codes.USAGE:
            return exit_codes.USAGE
        if not exit_codes.is_out_of_memory(error):
            traceback.print_exc()  # an error in the user's model or data code: the traceback says most
        return exit_codes.FAILED
    print_it(report)
    return exit_codes.FAILED if report.failed else exit_codes.DONE
