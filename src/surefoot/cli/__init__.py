"""The `surefoot` command; each sub-command imports what it needs when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surefoot import __version__

app = typer.Typer(
    name="surefoot",
    help="Keeps PyTorch training runs alive: refuses bad updates, says why, and gets the run back on its feet.",
    epilog="New here? Try: surefoot demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"surefoot {__version__}")
        raise typer.Exit


@app.callback()
def surefoot(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=200, help="Length of each training run.")] = 400,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the run and the picture.")] = Path("out/demo"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of model and data.")] = 0,
) -> None:
    """Watch a small model survive two planted faults that kill the same training loop without surefoot."""
    try:
        from surefoot.demo import show
    except ModuleNotFoundError as missing:
        if missing.name != "torch":
            raise
        typer.echo("the demo trains a model and needs torch: pip install 'surefoot[train,plots]'", err=True)
        raise typer.Exit(1) from None
    show(steps=steps, out=out, seed=seed)


def main() -> None:
    """Entry point of the console script."""
    app()
