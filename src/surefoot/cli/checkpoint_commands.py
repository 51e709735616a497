"""The `surefoot checkpoints` subcommands, and the option form they replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

_HELP = """List, verify, compare, export and convert checkpoints; a run is read and never changed.

Exit codes: 0 fine; 1 a checkpoint is damaged; 2 cannot be read, or bad usage.
"""
_EXAMPLES = """Examples:

surefoot checkpoints list runs/a

surefoot checkpoints verify runs/a

surefoot checkpoints compare runs/a 1000 2000

surefoot checkpoints export runs/a newest weights.safetensors

surefoot checkpoints convert model.pt model.safetensors
"""
_OLD_ACTIONS = {"--verify": 0, "--compare": 2, "--export": 2, "--convert": 2}
"""Options of the old form, `surefoot checkpoints RUN --verify`, and how many values each takes."""


class _Group(TyperGroup):
    """Also accepts the old form, in which options chose what to do."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        wants_help = any(arg in ("-h", "--help") for arg in args)
        if not wants_help and (not args or args[0] not in self.commands):
            args = translate_old_form(args)
        return super().parse_args(ctx, args)


def translate_old_form(args: list[str]) -> list[str]:
    """`RUN [--verify | --compare A B | --export STEP OUT] [--weights NAME] [--json]` or `--convert FILE OUT` as a
    subcommand and its arguments."""
    positional: list[str] = []
    options: list[str] = []
    actions: dict[str, list[str]] = {}
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        if arg in _OLD_ACTIONS:
            count = _OLD_ACTIONS[arg]
            actions[arg], rest = rest[:count], rest[count:]
            if len(actions[arg]) < count:
                _refuse(f"{arg} takes {count} values")
        elif arg == "--weights":
            options += [arg, *rest[:1]]
            rest = rest[1:]
        else:
            (options if arg.startswith("-") else positional).append(arg)
    if len(actions) > 1:
        _refuse("use one of --verify, --compare, --export and --convert at a time")
    if "--export" not in actions:
        options = _without_weights(options)
    if "--convert" in actions:
        return ["convert", *actions["--convert"], *options]
    if not positional:
        _refuse("name a run: surefoot checkpoints list RUN")
    for action, values in actions.items():
        return [action.removeprefix("--"), *positional, *values, *options]
    return ["list", *positional, *options]


def _without_weights(options: list[str]) -> list[str]:
    """The old form ignored --weights where nothing was exported."""
    kept = [option for option in options if not option.startswith("--weights=")]
    if "--weights" in kept:
        index = kept.index("--weights")
        del kept[index : index + 2]
    return kept


def _refuse(message: str) -> NoReturn:
    typer.echo(f"surefoot checkpoints: {message}", err=True)
    raise typer.Exit(2)


checkpoints_app = typer.Typer(
    cls=_Group,
    help=_HELP,
    epilog=_EXAMPLES,
    short_help="List, verify, compare, export and convert checkpoints.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
_Run = Annotated[Path, typer.Argument(metavar="RUN", help="The run_dir given to surefoot.attach.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@checkpoints_app.command("list")
def list_checkpoints(run: _Run, as_json: _AsJson = False) -> None:
    """List the checkpoints of a run, newest first."""
    from surefoot.cli.checkpoints import show_list

    raise typer.Exit(show_list(run, as_json=as_json))


@checkpoints_app.command()
def verify(run: _Run, as_json: _AsJson = False) -> None:
    """Read every byte of every checkpoint of a run; exit 1 when one is damaged."""
    from surefoot.cli.checkpoints import show_list

    raise typer.Exit(show_list(run, as_json=as_json, verify=True))


@checkpoints_app.command()
def compare(
    run: _Run,
    first: Annotated[str, typer.Argument(metavar="A", help="A step, a checkpoint's name, or newest.")],
    second: Annotated[str, typer.Argument(metavar="B", help="The same for the other one.")],
    as_json: _AsJson = False,
) -> None:
    """Show which files and tensors of two checkpoints differ."""
    from surefoot.cli.checkpoints import show_comparison

    raise typer.Exit(show_comparison(run, first, second, as_json=as_json))


@checkpoints_app.command()
def export(
    run: _Run,
    step: Annotated[str, typer.Argument(metavar="STEP", help="A step, a checkpoint's name, or newest.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The new .safetensors file.")],
    weights: Annotated[
        str, typer.Option(metavar="NAME", help="Which weights to export, such as extra.ema for averaged ones.")
    ] = "model",
    as_json: _AsJson = False,
) -> None:
    """Write the weights of a checkpoint as safetensors."""
    from surefoot.cli.checkpoints import show_export

    raise typer.Exit(show_export(run, step, out, weights=weights, as_json=as_json))


@checkpoints_app.command()
def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file of torch.save.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The new .safetensors file; a .json goes beside it.")],
    as_json: _AsJson = False,
) -> None:
    """Convert a file of torch.save to safetensors and JSON, without running its pickle."""
    from surefoot.cli.checkpoints import show_conversion

    raise typer.Exit(show_conversion(file, out, as_json=as_json))
