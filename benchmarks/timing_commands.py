"""The commands of `surefoot bench` that time something, or count what it visits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command_options import (
    Device,
    Size,
    check_model,
    fail,
    progress,
    usage_errors,
)
from surefoot.cli.needs import ENGINE, needs_torch

app = typer.Typer()


@app.command()
def overhead(
    device: Device = None,
    quick: Annotated[bool, typer.Option(help="Fewer rounds, for a rough result.")] = False,
    only: Annotated[str, typer.Option(help="Only table rows whose name contains this, such as 124m or Muon.")] = "",
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Also write the results as JSON to this file.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite the file named by --out, whatever it holds.")
    ] = False,
) -> None:
    """Step time with surefoot attached against the bare loop, as ratios from alternating blocks of one run."""
    needs_torch("bench overhead")
    from benchmarks.overhead import main as run

    with usage_errors():
        typer.echo(run(device, quick=quick, only=only, out=out, force=force, say=progress))


@app.command()
def equal(
    steps: Annotated[int, typer.Option(min=5, help="Updates in total, over five kinds of training loop.")] = 20_000,
) -> None:
    """Train bare and attached and compare every bit; exit 1 when any differs."""
    needs_torch("bench equal")
    from benchmarks.bit_equal import main as run

    raise typer.Exit(run(steps))


@app.command()
def judge() -> None:
    """Microseconds to judge one row of 300 tensors on this host."""
    from benchmarks.latency import judge_latency

    typer.echo(judge_latency())


@app.command()
def host(
    device: Device = None,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps.")] = 400,
) -> None:
    """Host microseconds that surefoot adds to a step, part by part, for 75 and 300 tensors."""
    needs_torch("bench host")
    from benchmarks.host_overhead import main as run

    with usage_errors():
        typer.echo(run(device, steps=steps))


@app.command()
def rewind(
    size: Annotated[str, typer.Option(help="Model size: tiny, 10m, 124m or 1.3b parameters.")] = "124m",
    device: Device = None,
) -> None:
    """Time to take a snapshot of a decoder with AdamW and to rewind; how often one is taken, what is lost, and how long
    trials take."""
    needs_torch("bench rewind")
    from benchmarks.latency import decision_time, rewind_latency, updates_lost

    if size != "tiny":
        check_model("bench rewind", size, device)
    typer.echo(rewind_latency(size, device))
    typer.echo(updates_lost(size, device))
    typer.echo(decision_time(size, device))


@app.command()
def checkpoint(
    size: Size = "124m",
    device: Device = None,
    folder: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, writable=True, help="Write the checkpoints below this folder."),
    ] = None,
) -> None:
    """How long a save stalls training, against torch.save and DCP; and how long a restore takes."""
    needs_torch("bench checkpoint")
    from benchmarks.save_cost import main as run

    check_model("bench checkpoint", size, device)
    typer.echo(run(size, device, folder, progress))


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A file, or the name of a shipped recipe.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the recipe with other values.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Approximate time to measure for.")] = 60.0,
) -> None:
    """Tokens per second of `surefoot train`, guard and checkpoints on, against a hand-written loop."""
    needs_torch("bench train", *ENGINE)
    from benchmarks.train_speed import main as run
    from surefoot.train.recipe import RecipeError

    try:
        typer.echo(run(recipe, overrides or (), seconds, progress))
    except RecipeError as error:
        raise fail(f"bench train: {error}") from None


@app.command()
def plan(
    only: Annotated[str, typer.Option(help="Only settings whose name contains this, such as lm-124m or compile.")] = "",
) -> None:
    """The memory that `surefoot plan` predicts against the peak of real steps; needs a GPU."""
    needs_torch("bench plan", *ENGINE)
    from benchmarks.plan_memory import main as run

    with usage_errors():
        typer.echo(run(only, progress))


@app.command()
def visits(
    files: Annotated[bool, typer.Option("--files", help="Also list every function called, by file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the counts and the functions as JSON.")] = False,
) -> None:
    """Count the surefoot source files and functions that one healthy step, and one checkpoint save, go through."""
    needs_torch("bench visits")
    from benchmarks.visits import measure, report

    counts = measure()
    if as_json:
        json.dump({name: visited.as_json() for name, visited in counts.items()}, sys.stdout, indent=1)
        typer.echo()
    else:
        typer.echo(report(counts, files=files))


@app.command()
def watch(
    steps: Annotated[int, typer.Option(min=1000, help="Steps of the made run.")] = 1_000_000,
    layers: Annotated[int, typer.Option(min=1, help="Tensors with a gradient norm in every row.")] = 300,
    folder: Annotated[
        Path | None, typer.Option(file_okay=False, help="Keep the made run here; the next call uses it again.")
    ] = None,
) -> None:
    """Time until `surefoot watch --web` shows a long run, zooms into it and follows it, and its memory."""
    from benchmarks.watch_bench import main as run

    typer.echo(run(folder, steps=steps, layers=layers, say=progress))
