"""`surefoot bench`: finds benchmarks/ in a checkout and loads its commands on first use."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperGroup

import surefoot

MISSING = (
    "surefoot bench: benchmarks/ is part of the source checkout, not of the installed package ({path} does not exist). "
    "Clone the repository, then: pip install -e ."
)


def checkout_root() -> Path:
    """The directory that holds benchmarks/ when surefoot is imported from a checkout."""
    return Path(surefoot.__file__).resolve().parents[2]


def load_commands() -> TyperGroup:
    """The command group of benchmarks/commands.py; exits with 2 where there is no checkout."""
    root = checkout_root()
    package = root / "benchmarks" / "__init__.py"
    if not (package.is_file() and (root / "pyproject.toml").is_file()):
        typer.echo(MISSING.format(path=package.parent), err=True)
        raise typer.Exit(2)
    if sys.path[:1] != [str(root)]:
        sys.path.insert(0, str(root))
    loaded = sys.modules.get("benchmarks")
    if loaded is not None and loaded.__file__ != str(package):  # another project's package of the same name
        for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
            del sys.modules[name]
    commands = importlib.import_module("benchmarks.commands")
    group: Any = typer.main.get_group(commands.app)
    return group


class BenchmarkGroup(TyperGroup):
    """Imports benchmarks/ only when `surefoot bench` itself is called."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        load_commands()  # before any help is printed: without a checkout there is one message and nothing else
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: Any) -> list[str]:
        return load_commands().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load_commands().get_command(ctx, cmd_name)


bench = typer.Typer(
    cls=BenchmarkGroup,
    help="The commands behind every number in the documentation; needs a source checkout.",
    no_args_is_help=True,
)
