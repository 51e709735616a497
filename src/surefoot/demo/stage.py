"""The demo on the console: what is planted, three runs told as they go on, what came of them, and what to try next."""

from __future__ import annotations

import itertools
import logging
import math
import re
import shlex
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from surefoot.demo.faults import FAULTS, planned
from surefoot.demo.picture import draw
from surefoot.demo.running import BARE, FIGURES, SOURCE, Result, go, overrides_of
from surefoot.guard.validate import switched_off
from surefoot.journal.output_files import OutputRefused

_LINES, _DEEPEST = 10, 12
"""Of the text that is shown: lines, and spaces in a row."""
console = Console(highlight=False, markup=False, soft_wrap=True)


def show(
    steps: Annotated[int, typer.Option(min=300)] = 500,
    out: Annotated[Path, typer.Option(file_okay=False)] = Path("out/demo"),
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1)] = 0,
) -> None:
    """Watch a small model survive three planted faults that ruin the same run without surefoot."""
    if switched_off():
        typer.echo("SUREFOOT=off is set, so there is nothing to show. Unset it and try again.", err=True)
        raise typer.Exit(2)
    started = time.monotonic()
    run_dir = room_in(out)
    faults = planned(steps)
    shared = overrides_of(steps, seed)
    guarded = (*shared, *FIGURES)
    console.print("A small language model learns Python from the source of its library. Three faults are planted:")
    for name, at in faults.items():
        say(at, "", FAULTS[name].words)
    console.print("\n1  surefoot train, its protection off, without the faults: to compare with", style="bold")
    results = {"no faults": go((*shared, *BARE), {}, say)}
    console.print("\n2  The same with the faults", style="bold")
    results["faults"] = go((*shared, *BARE), faults, say)
    console.print("\n3  The same with the faults, its protection on", style="bold")
    with told_once():
        results["faults and surefoot"] = go((*guarded, f"run_dir={run_dir}"), faults, say)

    console.print()
    compare(results)
    console.print("\nText that the third model writes", style="bold")
    for line in excerpt(results["faults and surefoot"].text):
        console.print(f"   | {line}")
    console.print(f"\nThe picture   {picture(results, out / 'loss.png', faults)}")
    console.print(f"The run       {run_dir}")
    what_next(guarded, run_dir, seed)
    console.print(f"\nThis took {time.monotonic() - started:.0f} s.")


def picture(results: dict[str, Result], path: Path, faults: dict[str, int]) -> str:
    """Where it was drawn, or why it was not: nothing here fails a demo that has been shown."""
    try:
        draw(results, faults, path)
    except ImportError:
        return "not drawn, matplotlib is missing: pip install matplotlib"
    except (OutputRefused, OSError) as error:
        return f"not drawn: {error}"
    return str(path)


def room_in(out: Path) -> Path:
    """A folder for the run that is watched; earlier ones are left alone."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        typer.echo(
            f"surefoot demo: {out} cannot be made: {error.strerror}. Choose another folder with --out.", err=True
        )
        raise typer.Exit(2) from None
    return next(path for number in itertools.count(1) if not (path := out / f"run-{number}").exists())


def say(step: int, label: str, words: str, style: str | None = None) -> None:
    """One line of a story; what is too long for the terminal goes on below its own beginning."""
    begin = f"   step {step:4}   {label:8} "
    width = max(80, min(console.width, 120)) if console.is_terminal else 120
    console.print(textwrap.fill(begin + words, width, subsequent_indent=" " * len(begin)), style=style)


@contextmanager
def told_once() -> Iterator[None]:
    """Keep surefoot's own warnings off the console: the story tells them. Its errors still come through."""
    log = logging.getLogger("surefoot")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def excerpt(text: str) -> list[str]:
    """The first lines of a text that have words in them, the deepest indentations shortened."""
    lines = [re.sub(f" {{{_DEEPEST},}}", " " * _DEEPEST, line)[:100] for line in text.splitlines() if line.strip()]
    return lines[:_LINES]


def compare(results: dict[str, Result]) -> None:
    """The final losses side by side."""
    table = Table("   loss on text it never saw", "", "against no faults", box=None, pad_edge=False)
    best = next(iter(results.values())).held_out
    for name, result in results.items():
        if math.isnan(result.held_out):
            alive = [loss for loss in result.evaluations if math.isfinite(loss)]
            table.add_row(f"   {name}", "NaN", f"dead; before that {alive[-1]:.3f}, x {alive[-1] / best:.3f}")
        else:
            table.add_row(f"   {name}", f"{result.held_out:.3f}", f"x {result.held_out / best:.3f}")
    console.print(table)
    *_, last = results.values()
    again = len(last.losses) - last.updates
    console.print(f"   The last run made {again} updates more than the first: those that it took back.")


def what_next(guarded: tuple[str, ...], run_dir: Path, seed: int) -> None:
    """Commands that work from here."""
    console.print("\nWhat to try next", style="bold")
    rows = {
        f"surefoot train {SOURCE}": "the whole recipe, without faults: a better writer in some minutes",
        "surefoot recipes": "the other recipes, to run or to copy and edit",
        f"surefoot diagnose {shlex.quote(str(run_dir))}": "what the journal of the third run has to say",
        f"surefoot demo --seed {(seed + 1) % 2**32}": "the same with other data",
    }
    for command, words in rows.items():
        console.print(f"   {command:38} {words}")
    console.print("\nThe third run without its faults, as one would type it:")
    console.print(f"   surefoot train {SOURCE} {shlex.join((*guarded, 'run_dir=runs/demo'))}")
    console.print("Its figures are those of a short run: a snapshot every 20 updates, weights measured at each.")
    console.print("\nIn a loop of your own it takes two lines:")
    console.print('   guard = surefoot.attach(model, optimizer, run_dir="runs/first")   # before the loop')
    console.print("   loss = guard.watch(loss, batch)   # in the loop, before backward")
