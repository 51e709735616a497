"""Options and checks that the commands of `surefoot bench` share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

SIZES = ("10m", "124m", "1.3b")
DEVICES = ("cpu", "cuda")

Device = Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda if there is one.")]
Size = Annotated[str, typer.Option(help="Model size: 10m, 124m or 1.3b parameters.")]
Jobs = Annotated[int, typer.Option(min=0, help="Worker processes; 0 starts one per core.")]
SplitName = Annotated[str, typer.Option(help="report, or tuning: the split that thresholds may be tuned on.")]


def fail(message: str) -> typer.Exit:
    """Print an error; raise what this returns to exit with 2."""
    typer.echo(message, err=True)
    return typer.Exit(2)


def progress(line: str) -> None:
    typer.echo(line, err=True)


@contextmanager
def usage_errors(prefix: str = "") -> Iterator[None]:
    """Turn a ValueError into one line on stderr and exit code 2."""
    try:
        yield
    except ValueError as error:
        raise fail(f"{prefix}{error}") from None


def check_model(command: str, size: str, device: str | None) -> None:
    if size not in SIZES or device not in (None, *DEVICES):
        raise fail(f"{command}: use --size {', '.join(SIZES[:-1])} or {SIZES[-1]} and --device {' or '.join(DEVICES)}.")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise fail(f"{command}: no CUDA device found. Use --device cpu.")


def check_split(command: str, split: str) -> None:
    from benchmarks.zoo.families import Split

    if split not in list(Split):
        raise fail(f"{command}: --split {split} is unknown. Use {' or '.join(Split)}.")
