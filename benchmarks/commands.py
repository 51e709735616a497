"""The commands of `surefoot bench`; each imports its benchmark when it is called."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.command_options import (
    Device,
    Jobs,
    SplitName,
    check_model,
    check_split,
    fail,
    progress,
    usage_errors,
)
from benchmarks.timing_commands import app as timing_app
from surefoot.cli.needs import needs_torch

app = typer.Typer(help="The commands behind every number in the documentation.", no_args_is_help=True)
app.add_typer(timing_app)


@app.command()
def zoo(
    split: SplitName = "report",
    only: Annotated[str, typer.Option(help="Only scenarios whose name contains this, such as rate or decoder.")] = "",
    quick: Annotated[bool, typer.Option(help="One run per cause, about two minutes.")] = False,
    own: Annotated[bool, typer.Option("--own", help="Leave out other projects' loops.")] = False,
    seeds: Annotated[int, typer.Option(min=1, max=2, help="Seeds per scenario; with 1 the scenarios alternate.")] = 1,
    jobs: Jobs = 0,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the runs, reused by the next call.")] = Path(
        "runs/zoo"
    ),
    page: Annotated[
        Path | None, typer.Option(file_okay=False, help="Also write zoo.md and its plots to this folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Score every rule on planted faults and healthy controls: detected, cured, false alarms. Resumable."""
    needs_torch("bench zoo")
    from benchmarks.zoo.families import Split
    from benchmarks.zoo.scoreboard import Selection
    from benchmarks.zoo.scoreboard.console import show

    check_split("bench zoo", split)
    if page is not None and importlib.util.find_spec("matplotlib") is None:
        raise fail("bench zoo: --page draws plots and needs matplotlib: pip install 'surefoot[plots]'")
    selection = Selection(split=Split(split), only=only, quick=quick, seeds=seeds, own=own)
    raise typer.Exit(show(selection, jobs=jobs, out=out, page=page, as_json=as_json))


@app.command()
def scale(
    device: Device = None,
    size: Annotated[str, typer.Option(help="85m; small: for a CPU, half an hour; tiny: to try it out.")] = "85m",
    quick: Annotated[bool, typer.Option(help="Eight scenarios, without the other rules.")] = False,
    only: Annotated[str, typer.Option(help="Only scenarios whose name contains this, such as lr_ or garbage.")] = "",
    out: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Also write the results as JSON as they come; the next call continues."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite the file named by --out, whatever it holds.")
    ] = False,
    keep: Annotated[
        Path | None, typer.Option(file_okay=False, help="Keep surefoot's run directories in this folder.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="No further run begins after this time.")] = 540.0,
    show: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Only print the tables of a file that --out wrote.")
    ] = None,
) -> None:
    """Plant faults and healthy changes in an 85 M decoder on real text, and compare surefoot with other rules."""
    needs_torch("bench scale")
    from benchmarks.scale.scale_bench import main as run
    from benchmarks.scale.scale_bench import stored_board

    with usage_errors():
        if show is not None:
            board = stored_board(show)
        else:
            options = {"quick": quick, "only": only, "out": out, "force": force, "keep": keep, "seconds": seconds}
            board = run(size, device, **options, say=progress)
    typer.echo(board.as_markdown())
    raise typer.Exit(1 if board.errors else 0)


@app.command()
def origin(
    split: SplitName = "report",
    only: Annotated[str, typer.Option(help="Only cases whose family or fault contains this, such as sqrt.")] = "",
    size: Annotated[str, typer.Option(help="Only time a decoder of this size: tiny, 10m or 124m.")] = "",
    device: Device = None,
) -> None:
    """Plant non-finite values, forward and backward, and count what `surefoot.locate` names; exit 1 below 95 %."""
    needs_torch("bench origin")
    from benchmarks.origin.origin_bench import main as run
    from benchmarks.origin.origin_bench import report

    check_split("bench origin", split)
    if size:
        from benchmarks.origin.decoder_time import main as timed

        if size != "tiny":
            check_model("bench origin", size, device)
        typer.echo(timed(size, device))
        return
    cases = run(split, only=only, say=progress)
    if not cases:
        raise fail(f"bench origin: no case is called {only}.")
    typer.echo(report(cases))
    raise typer.Exit(0 if sum(c.right for c in cases) >= 0.95 * len(cases) else 1)


@app.command()
def memory(device: Device = None) -> None:
    """Run out of memory at 20 moments: GPU memory is taken away, else limits are planted; exit 1 where one fails."""
    needs_torch("bench memory")
    import torch

    from benchmarks.memory_bench import main as run
    from benchmarks.memory_bench import report

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    moments = run(device, say=progress)
    typer.echo(report(moments, device))
    raise typer.Exit(0 if all(moment.right for moment in moments) else 1)


@app.command()
def logs(
    folder: Annotated[
        Path | None, typer.Argument(help="Logs with an INDEX.csv: file, label, source.", file_okay=False)
    ] = None,
    cross_validate: Annotated[
        bool, typer.Option("--cross-validate", help="Also judge each repository with thresholds chosen on the others.")
    ] = False,
    speed: Annotated[
        bool, typer.Option("--speed", help="Time and memory for large generated logs (1.5 GB of temporary files).")
    ] = False,
    made: Annotated[
        bool,
        typer.Option("--made", help="Made-up curves of up to a million rows, whole and at every prefix of a grid."),
    ] = False,
    split: SplitName = "report",
) -> None:
    """Accuracy of `surefoot diagnose` on hand-labelled logs and on made-up curves, and its speed."""
    from benchmarks.log_accuracy import main as accuracy
    from benchmarks.log_speed import main as timing
    from benchmarks.made_accuracy import main as made_accuracy

    if speed:
        typer.echo(timing(say=progress))
    if made:
        if split not in ("report", "tuning"):
            raise fail(f"bench logs: --split {split} is unknown. Use report or tuning.")
        typer.echo(made_accuracy(held_back=split == "report", say=progress))
    if folder is None and not speed and not made:
        raise fail("bench logs: name a folder of labelled logs, or use --made or --speed.")
    if folder is None:
        return
    with usage_errors():
        typer.echo(accuracy(folder, cross_validate=cross_validate, say=progress))


@app.command()
def healthy(
    steps: Annotated[int, typer.Option(min=1, help="Healthy steps in total.")] = 300_000,
    split: SplitName = "report",
    seed: Annotated[int | None, typer.Option(min=0, help="First seed; use one that nothing was tuned on.")] = None,
    jobs: Jobs = 0,
) -> None:
    """Train suspicious but healthy runs with new seeds; exit 1 when surefoot intervenes in any of them."""
    needs_torch("bench healthy")
    from benchmarks.healthy_runs import FIRST_SEED
    from benchmarks.healthy_runs import main as run
    from benchmarks.worker_pool import available_cores
    from benchmarks.zoo.families import Split

    check_split("bench healthy", split)

    def report(done: int, total: int) -> None:
        if done * 20 // total > (done - 1) * 20 // total:
            progress(f"{done} of {total} runs done")

    first_seed = FIRST_SEED if seed is None else seed
    workers = jobs or available_cores()
    tally = run(Split(split), steps=steps, first_seed=first_seed, workers=workers, progress=report)
    typer.echo(tally.as_text())
    raise typer.Exit(1 if tally.touched else 0)


@app.command()
def chaos(
    only: Annotated[
        str, typer.Option(help="One fault: kill, crash, damage, disk, signal, clock, code, resume or reshard.")
    ] = "",
    quick: Annotated[bool, typer.Option(help="As few trials as the test suite: a few minutes.")] = False,
    times: Annotated[int | None, typer.Option(min=0, help="Trials per fault; 0 tries every case.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random moments.")] = 0,
    page: Annotated[Path | None, typer.Option(file_okay=False, help="Also write chaos.md to this folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Kill real training processes, break their disks and corrupt their files; exit 1 when a run was lost."""
    needs_torch("bench chaos")
    from benchmarks.chaos.report import show

    raise typer.Exit(show(only=only, quick=quick, times=times, seed=seed, page=page, as_json=as_json))


@app.command()
def silent(
    split: Annotated[str, typer.Option(help="tuning or report; by default both halves of the suite.")] = "",
    only: Annotated[str, typer.Option(help="Only loops whose name or family contains this.")] = "",
    details: Annotated[bool, typer.Option("--details", help="Also print every finding.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Silent bugs and healthy twins: what preflight and the first steps name; exit 1 when a healthy one fails."""
    needs_torch("bench silent")
    from benchmarks.silent_bugs.loops import Half
    from benchmarks.silent_bugs.silent_bench import main as run

    if split and split not in list(Half):
        raise fail(f"bench silent: --split {split} is unknown. Use {' or '.join(Half)}.")
    text, passed = run(Half(split) if split else None, only=only, details=details, as_json=as_json, say=progress)
    typer.echo(text)
    raise typer.Exit(0 if passed else 1)


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run_dir that was given to surefoot.attach.")],
    policy: Annotated[
        str, typer.Option(help="observe or protect, each with its defaults; by default the recorded run's own policy.")
    ] = "",
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Change one setting, such as max_norm_ratio=10 or thresholds.norm_jump_ratio=8; may be repeated.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the decisions as JSON.")] = False,
) -> None:
    """Judge a recorded run again by its own policy (exit 1 when a decision differs) or by another one."""
    from benchmarks.replay_report import show

    raise typer.Exit(show(run, name=policy, settings=settings or (), as_json=as_json))


@app.command()
def causes(
    every: Annotated[int, typer.Option(min=1, help="Only each so-manieth fault of both parts of the zoo.")] = 4,
    jobs: Jobs = 0,
    runs: Annotated[Path, typer.Option(file_okay=False, help="Folder for the runs, reused by the next call.")] = Path(
        "runs/zoo"
    ),
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Write the fitted confidences as JSON to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Fit how much each clue counts for its cause to the tuning part of the zoo; judge the fit on the other part."""
    needs_torch("bench causes")
    from benchmarks.cause_fit import main as run
    from benchmarks.worker_pool import available_cores

    with usage_errors("bench causes: "):
        text = run(runs, every=every, workers=jobs or available_cores(), out=out, as_json=as_json, progress=progress)
    typer.echo(text)
