"""Checks that the optional packages of a command are installed."""

from __future__ import annotations

import importlib.util

import typer

ENGINE = ("torchdata", "psutil", "filelock")
"""What the training engine needs besides torch."""


def needs_torch(what: str, *others: str) -> None:
    """Exit with code 2 and the install command if torch or one of the others is missing."""
    missing = [name for name in ("torch", *others) if importlib.util.find_spec(name) is None]
    if missing:
        typer.echo(
            f"{what} trains a model and needs {' and '.join(missing)}: pip install 'surefoot[train,plots]'", err=True
        )
        raise typer.Exit(2)
