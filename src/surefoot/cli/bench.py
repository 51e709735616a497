"""`surefoot bench`: the commands behind every figure this project states."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from surefoot.cli.needs import ENGINE, needs_torch

bench = typer.Typer(help="The commands behind every figure this project states.", no_args_is_help=True)


@bench.command()
def overhead(
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default what is there.")] = None,
    quick: Annotated[bool, typer.Option(help="Fewer rounds: a first look.")] = False,
    only: Annotated[str, typer.Option(help="Only the lines whose name contains this, such as 124m or Muon.")] = "",
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Also write the figures as JSON to this file.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file named by --out, whatever it holds.")] = False,
) -> None:
    """What being watched costs: attached against bare, as ratios from alternating blocks of one run."""
    needs_torch("bench overhead")
    from benchmarks.overhead import main as run

    try:
        typer.echo(
            run(device, quick=quick, only=only, out=out, force=force, say=lambda line: typer.echo(line, err=True))
        )
    except ValueError as wrong:
        typer.echo(str(wrong), err=True)
        raise typer.Exit(2) from None


@bench.command()
def equal(
    steps: Annotated[int, typer.Option(min=5, help="Updates in all, over five families of models.")] = 20_000,
) -> None:
    """Proof that a healthy run is left alone: attached and bare, bit for bit the same."""
    needs_torch("bench equal")
    from benchmarks.bit_equal import main as run

    raise typer.Exit(run(steps))


@bench.command()
def zoo(
    split: Annotated[str, typer.Option(help="report, or tuning: the part that rules may be tuned on.")] = "report",
    only: Annotated[str, typer.Option(help="Only scenarios whose name contains this, such as rate or decoder.")] = "",
    quick: Annotated[bool, typer.Option(help="One run of each cause: a first look in two minutes.")] = False,
    seeds: Annotated[int, typer.Option(min=1, max=2, help="Seeds for each scenario; one takes turns.")] = 1,
    jobs: Annotated[int, typer.Option(min=0, help="Processes at work; 0 takes one a core.")] = 0,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the runs; kept, and used again.")] = Path(
        "runs/zoo"
    ),
    page: Annotated[
        Path | None, typer.Option(file_okay=False, help="Also write the page with pictures to this folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Every rule against planted faults and healthy controls: seen, cured, false alarms. Goes on where it was cut."""
    needs_torch("bench zoo")
    from benchmarks.zoo.families import Split
    from benchmarks.zoo.scoreboard import Choice
    from surefoot.cli.zoo import show

    if split not in list(Split):
        typer.echo(f"bench zoo: --split {split} is unknown. Use {' or '.join(Split)}.", err=True)
        raise typer.Exit(2)
    if page is not None and importlib.util.find_spec("matplotlib") is None:
        typer.echo("bench zoo: --page draws pictures and needs matplotlib: pip install 'surefoot[plots]'", err=True)
        raise typer.Exit(2)
    choice = Choice(split=Split(split), only=only, quick=quick, seeds=seeds)
    raise typer.Exit(show(choice, jobs=jobs, out=out, page=page, as_json=as_json))


@bench.command()
def logs(
    folder: Annotated[
        Path | None, typer.Argument(help="Logs with an INDEX.csv: file, label, source.", file_okay=False)
    ] = None,
    crossed: Annotated[
        bool, typer.Option("--cross-validate", help="Also judge each repository with figures chosen on the others.")
    ] = False,
    speed: Annotated[
        bool, typer.Option("--speed", help="How long large logs take, and how much memory; makes them, 1.5 GB.")
    ] = False,
) -> None:
    """How often `surefoot diagnose` is right about logs that somebody has judged by eye, and how fast it is."""
    from benchmarks.log_accuracy import main as run
    from benchmarks.log_speed import main as timed

    if speed:
        typer.echo(timed(say=lambda line: typer.echo(line, err=True)))
    elif folder is None:
        typer.echo("bench logs: name a folder of labelled logs, or --speed.", err=True)
        raise typer.Exit(2)
    if folder is None:
        return
    try:
        typer.echo(run(folder, crossed=crossed, say=lambda line: typer.echo(line, err=True)))
    except ValueError as wrong:
        typer.echo(str(wrong), err=True)
        raise typer.Exit(2) from None


@bench.command()
def judge() -> None:
    """How long judging one row takes on this host, for 300 tensors."""
    from benchmarks.latency import judge as measure

    typer.echo(measure())


@bench.command()
def host(
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default what is there.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are timed.")] = 400,
) -> None:
    """Microseconds of the host that being watched adds to a step, part by part, for 75 and 300 tensors."""
    needs_torch("bench host")
    from benchmarks.host_overhead import main as run

    try:
        typer.echo(run(device, steps=steps))
    except ValueError as wrong:
        typer.echo(str(wrong), err=True)
        raise typer.Exit(2) from None


@bench.command()
def rewind(
    size: Annotated[str, typer.Option(help="10m, 124m or 1.3b.")] = "124m",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default what is there.")] = None,
) -> None:
    """How long a state takes to be kept and put back: a decoder with AdamW."""
    needs_torch("bench rewind")
    from benchmarks.latency import rewind as measure

    sizes, devices = ("10m", "124m", "1.3b"), (None, "cpu", "cuda")
    if device == "cuda" and not _has_cuda():
        typer.echo("bench rewind: there is no CUDA device here. Use --device cpu.", err=True)
        raise typer.Exit(2)
    if size not in sizes or device not in devices:
        typer.echo(f"bench rewind: use --size {', '.join(sizes)} and --device cpu or cuda.", err=True)
        raise typer.Exit(2)
    typer.echo(measure(size, device))


@bench.command()
def checkpoint(
    size: Annotated[str, typer.Option(help="10m, 124m or 1.3b.")] = "124m",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default what is there.")] = None,
    folder: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, writable=True, help="A folder on the disk to write to."),
    ] = None,
) -> None:
    """What a save costs the training beside it, against torch.save and DCP; and a restore."""
    needs_torch("bench checkpoint")
    from benchmarks.save_cost import main as run

    if size not in ("10m", "124m", "1.3b") or device not in (None, "cpu", "cuda"):
        typer.echo("bench checkpoint: use --size 10m, 124m or 1.3b and --device cpu or cuda.", err=True)
        raise typer.Exit(2)
    if device == "cuda" and not _has_cuda():
        typer.echo("bench checkpoint: there is no CUDA device here. Use --device cpu.", err=True)
        raise typer.Exit(2)
    typer.echo(run(size, device, folder, lambda line: typer.echo(line, err=True)))


@bench.command("train")
def bench_train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A file, or the name of a shipped recipe.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the recipe with other values.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="How long to measure, about.")] = 60.0,
) -> None:
    """Tokens a second of `surefoot train`, guard and checkpoints on, against a hand-written loop of the same model."""
    needs_torch("bench train", *ENGINE)
    from benchmarks.train_speed import main as run
    from surefoot.train.recipe import RecipeError

    try:
        typer.echo(run(recipe, overrides or (), seconds, lambda line: typer.echo(line, err=True)))
    except RecipeError as error:
        typer.echo(f"bench train: {error}", err=True)
        raise typer.Exit(2) from None


@bench.command()
def healthy(
    steps: Annotated[int, typer.Option(min=1, help="Healthy steps in all.")] = 300_000,
    split: Annotated[str, typer.Option(help="report, or tuning: the part that rules may be tuned on.")] = "report",
    seed: Annotated[int | None, typer.Option(min=0, help="The first seed; take one that nobody has looked at.")] = None,
    jobs: Annotated[int, typer.Option(min=0, help="Processes at work; 0 takes one a core.")] = 0,
) -> None:
    """Suspicious but healthy runs, with ever new seeds: is any of them touched? 1 when one is."""
    needs_torch("bench healthy")
    from benchmarks.healthy_runs import FIRST_SEED
    from benchmarks.healthy_runs import main as run
    from benchmarks.worker_pool import cores
    from benchmarks.zoo.families import Split

    if split not in list(Split):
        typer.echo(f"bench healthy: --split {split} is unknown. Use {' or '.join(Split)}.", err=True)
        raise typer.Exit(2)

    def tell(done: int, total: int) -> None:
        if done * 20 // total > (done - 1) * 20 // total:
            typer.echo(f"{done} of {total} runs made", err=True)

    first = FIRST_SEED if seed is None else seed
    tally = run(Split(split), steps=steps, first=first, workers=jobs or cores(), progress=tell)
    typer.echo(tally.as_text())
    raise typer.Exit(1 if tally.touched else 0)


@bench.command()
def chaos(
    only: Annotated[
        str, typer.Option(help="One fault: kill, crash, damage, disk, signal, clock, code, resume or reshard.")
    ] = "",
    quick: Annotated[bool, typer.Option(help="As often as the tests do: a few minutes.")] = False,
    times: Annotated[int | None, typer.Option(min=0, help="How often each is tried; 0 is every case there is.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random moments.")] = 0,
    page: Annotated[Path | None, typer.Option(file_okay=False, help="Also write chaos.md to this folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what came of it as JSON.")] = False,
) -> None:
    """Real runs, really killed, on disks that fail and with files that are harmed; 1 when one was lost."""
    needs_torch("bench chaos")
    from surefoot.cli.chaos import show

    raise typer.Exit(show(only=only, quick=quick, times=times, seed=seed, page=page, as_json=as_json))


@bench.command()
def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run_dir that was given to surefoot.attach.")],
    policy: Annotated[
        str, typer.Option(help="observe or protect, with surefoot's own figures; by default the run's own policy.")
    ] = "",
    figures: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Another figure, such as outlandish=10 or sight.jump=8; may be repeated.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the decisions as JSON.")] = False,
) -> None:
    """Judge a recorded run again: the same decisions, or those another policy would have made."""
    from surefoot.cli.replay import show

    raise typer.Exit(show(run, name=policy, figures=figures or (), as_json=as_json))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()
