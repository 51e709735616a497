"""The commands `surefoot cases` and `surefoot data`; each imports what it needs when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

CASES = """List the incidents of all runs below a folder: what happened, what was tried, and whether it helped.

FOLDER holds run directories, at any depth, or is a case library that --export has written. Pass either one to \
surefoot.attach(..., cases=...), or as protection.cases in a recipe: a new incident then names the old ones that are \
most like it, and what helped there is tried first.

Exit codes: 0 fine; 2 bad usage.
"""
CASES_EXAMPLES = """Examples:

surefoot cases

surefoot cases runs --cause learning_rate --model transformer

surefoot cases runs --export library.jsonl

surefoot cases library.jsonl --json
"""


def cases(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="A folder with runs, or a case library.")] = Path(),
    cause: Annotated[str, typer.Option(metavar="NAME", help="Only this cause, such as learning_rate.")] = "",
    model: Annotated[str, typer.Option(metavar="NAME", help="Only models whose family or class has this in it.")] = "",
    export: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Write the cases to this library, which can be shared.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the cases as JSON.")] = False,
) -> None:
    from surefoot.cli.cases_page import CasesOptions, show

    raise typer.Exit(show(folder, CasesOptions(cause=cause, model=model, export=export, as_json=as_json)))


DATA = """List the samples that a run does not train on any more, lift bans, or add some; needs no torch.

A sample that makes an update non-finite is banned by itself, if the loader is one of surefoot.data and step_fn is \
given. --lift and --ban hold from the next resume on, and are refused while the run is training.

Exit codes: 0 fine; 2 bad usage.
"""
DATA_EXAMPLES = """Examples:

surefoot data runs/a

surefoot data runs/a --lift 17 --lift 23

surefoot data runs/a --lift all

surefoot data runs/a --ban 4711
"""


def data(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    lift: Annotated[
        list[str] | None, typer.Option(metavar="SAMPLE", help="Train on this sample again; all: on every one.")
    ] = None,
    ban: Annotated[list[str] | None, typer.Option(metavar="SAMPLE", help="Do not train on this sample.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the bans as JSON.")] = False,
) -> None:
    from surefoot.cli.data_bans import show

    raise typer.Exit(show(run, lift=lift or (), ban=ban or (), as_json=as_json))
