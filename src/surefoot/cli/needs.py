"""What a command needs that a bare installation has not."""

from __future__ import annotations

import importlib.util

import typer

ENGINE = ("torchdata", "psutil", "filelock")
"""What the engine needs beside torch."""


def needs_torch(what: str, *others: str) -> None:
    """Exit with 2, and the way out, where torch or one of the others is missing."""
    missing = [name for name in ("torch", *others) if importlib.util.find_spec(name) is None]
    if missing:
        typer.echo(
            f"{what} trains a model and needs {' and '.join(missing)}: pip install 'surefoot[train,plots]'", err=True
        )
        raise typer.Exit(2)
