"""The `surefoot` command; each sub-command imports what it needs when it is called."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from surefoot import __version__

app = typer.Typer(
    name="surefoot",
    help="Keeps PyTorch training runs alive: refuses bad updates, says why, and gets the run back on its feet.",
    epilog="New here? Try: surefoot demo. A run died? Try: surefoot diagnose train.log",
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
    steps: Annotated[int, typer.Option(min=300, help="Updates of each of the three runs.")] = 500,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the run and the picture.")] = Path("out/demo"),
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of model and data.")] = 0,
) -> None:
    """Watch a small model survive three planted faults that ruin the same run without surefoot."""
    _needs_torch("demo")
    from surefoot.demo import show

    show(steps=steps, out=out, seed=seed)


_TRAIN = """Train a model from a recipe, safe from the first step.

RECIPE is a YAML or JSON file, or the name of one that is shipped: surefoot recipes lists them. Any key of it can be \
set behind it, as key.sub=value; a list tries each value in a run of its own. The same command again goes on where \
the run was.

On several GPUs or machines: torchrun --nproc-per-node 8 -m surefoot train RECIPE

Exit code: 0 done, 1 the run failed, 2 bad usage, 75 restart me (ended by a signal, and saved; a lost process), \
76 do not restart me (surefoot stopped the run, and would again).
"""
_TRAIN_EXAMPLES = """Examples:

surefoot train lm-tiny

surefoot train mine.yaml optimizer.lr=3e-4 batch.size=64

surefoot train lm-tiny 'optimizer.lr=[1e-3, 3e-3]' steps=200

surefoot recipes --keys
"""


@app.command(help=_TRAIN, epilog=_TRAIN_EXAMPLES, short_help="From a recipe to a trained model, safe from the start.")
def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A file, or the name of a shipped recipe.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the recipe with other values.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="At the end print what came of it as JSON.")] = False,
) -> None:
    _needs_torch("train")
    from surefoot.cli.train import show

    raise typer.Exit(show(recipe, overrides or (), as_json=as_json))


_CHECK = """Try a recipe for a short while before the long run, and answer the checklist.

About 100 updates are really made, with the recipe's own model, data and settings, in a folder of their own that is \
removed again: memory, speed and time, gradients by layer, a clip threshold, the data, saving and going on, standstill.

Exit code: 0 fine, 1 an item failed, 2 bad usage.
"""
_CHECK_EXAMPLES = """Examples:

surefoot check lm-tiny

surefoot check mine.yaml optimizer.lr=3e-4 --steps 30

torchrun --nproc-per-node 8 -m surefoot check mine.yaml
"""


@app.command(help=_CHECK, epilog=_CHECK_EXAMPLES, short_help="Try a recipe before the long run: will it go well?")
def check(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A file, or the name of a shipped recipe.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the recipe with other values.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Updates to try; fewer when the recipe has fewer.")] = 100,
    seconds: Annotated[float, typer.Option(min=1, help="Train no longer than this.")] = 60.0,
    patience: Annotated[float, typer.Option(min=1, help="Seconds without an update that count as hung.")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answers as one JSON object.")] = False,
) -> None:
    _needs_torch("check")
    from surefoot.cli.check import show

    raise typer.Exit(show(recipe, overrides or (), steps=steps, seconds=seconds, patience=patience, as_json=as_json))


_DIAGNOSE = """Tell from any training log what went wrong, when it began and what to do; needs no torch.

PATH is a log of any trainer (Hugging Face, Lightning, Keras, nanoGPT, Megatron, ...), as JSON, JSONL, CSV, \
TensorBoard, W&B or console text; a checkpoint; a run directory or any folder with logs; or - for a pipe.

Exit code: 0 all is well or too little to tell, 1 trouble found, 2 cannot be read.
"""
_DIAGNOSE_EXAMPLES = """Examples:

surefoot diagnose train.log

surefoot diagnose trainer_state.json --html answer.html

surefoot diagnose --compare old.csv new.csv

surefoot diagnose --follow train.log || ./stop-the-job.sh
"""


@app.command(
    help=_DIAGNOSE,
    epilog=_DIAGNOSE_EXAMPLES,
    short_help="Any training log, one answer: what went wrong, when, and what to do.",
)
def diagnose(
    paths: Annotated[list[str], typer.Argument(metavar="PATH", help="A log, checkpoint or folder; - for a pipe.")],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the answer as JSON; a list for several paths.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Also draw a picture into this file: .png, .svg or .pdf.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Also write a page for a browser to this file: all in one.")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Set two logs beside each other.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Read on as the log grows; speak, and exit with 1, when it fails.")
    ] = False,
    on: Annotated[str, typer.Option(help="With --follow: exit on failed, or already on warning.")] = "failed",
    timeout: Annotated[
        float | None, typer.Option(min=0, help="With --follow: exit after so many seconds without a new line.")
    ] = None,
    step: Annotated[str, typer.Option(metavar="NAME", help="The column with the steps.")] = "",
    loss: Annotated[str, typer.Option(metavar="NAME", help="The column with the training loss.")] = "",
    eval_loss: Annotated[str, typer.Option(metavar="NAME", help="The column with the evaluation loss.")] = "",
    norm: Annotated[str, typer.Option(metavar="NAME", help="The column with the gradient norm.")] = "",
    rate: Annotated[str, typer.Option(metavar="NAME", help="The column with the learning rate.")] = "",
    scale: Annotated[str, typer.Option(metavar="NAME", help="The column with the loss scale of float16.")] = "",
) -> None:
    from surefoot.cli.diagnose import Wishes, show

    told = {"step": step, "loss": loss, "eval_loss": eval_loss, "norm": norm, "rate": rate, "scale": scale}
    columns = {role: name for role, name in told.items() if name}
    wishes = Wishes(
        as_json=as_json, plot=plot, html=html, compare=compare, follow=follow, on=on, timeout=timeout, columns=columns
    )
    raise typer.Exit(show(paths, wishes))


_CHECKPOINTS = """List, verify, compare, export and convert checkpoints; reads a run and never changes it.

Exit code: 0 fine, 1 a checkpoint is damaged, 2 cannot be read or bad usage.
"""
_CHECKPOINTS_EXAMPLES = """Examples:

surefoot checkpoints runs/a --verify

surefoot checkpoints runs/a --compare 1000 2000

surefoot checkpoints runs/a --export newest weights.safetensors

surefoot checkpoints --convert model.pt model.safetensors
"""


@app.command(help=_CHECKPOINTS, epilog=_CHECKPOINTS_EXAMPLES, short_help="List, verify and compare checkpoints.")
def checkpoints(
    run: Annotated[
        Path | None, typer.Argument(metavar="[RUN]", help="The run_dir that was given to surefoot.attach.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
    verify: Annotated[bool, typer.Option("--verify", help="Read every byte of every checkpoint.")] = False,
    compare: Annotated[
        tuple[str, str] | None, typer.Option(metavar="A B", help="How two differ, by step, name or as newest.")
    ] = None,
    export: Annotated[
        tuple[str, Path] | None, typer.Option(metavar="STEP OUT", help="Write the weights of one as safetensors.")
    ] = None,
    weights: Annotated[
        str, typer.Option(metavar="NAME", help="Whose weights to export, such as extra.ema for averaged ones.")
    ] = "model",
    convert: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="FILE OUT", help="A file of torch.save as safetensors and JSON.")
    ] = None,
) -> None:
    from surefoot.cli.checkpoints import Wishes, show

    wishes = Wishes(as_json=as_json, verify=verify, compare=compare, export=export, weights=weights, convert=convert)
    raise typer.Exit(show(run, wishes))


_RECIPES = """List the recipes that come with surefoot, copy one to edit, or explain every key; needs no torch.

Exit code: 0 fine, 2 bad usage; a file that is there already is never written over.
"""
_RECIPES_EXAMPLES = """Examples:

surefoot recipes

surefoot recipes lm-tiny --to mine.yaml

surefoot recipes --keys

surefoot recipes optimizer --keys
"""


@app.command(help=_RECIPES, epilog=_RECIPES_EXAMPLES, short_help="Recipes to run or copy, and every key they may have.")
def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The recipe to print; with --keys a section, as optimizer.")
    ] = None,
    to: Annotated[Path | None, typer.Option(help="Copy it, with its comments, to this new file or folder.")] = None,
    keys: Annotated[bool, typer.Option("--keys", help="Every key with its kind, default and meaning.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON; of a recipe, with all defaults.")] = False,
) -> None:
    from surefoot.cli.recipes import Wishes, show

    raise typer.Exit(show(name, Wishes(as_json=as_json, to=to, keys=keys)))


bench = typer.Typer(help="The commands behind every figure this project states.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command()
def overhead(
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default what is there.")] = None,
    quick: Annotated[bool, typer.Option(help="Fewer rounds: a first look.")] = False,
    only: Annotated[str, typer.Option(help="Only the lines whose name contains this, such as 124m or Muon.")] = "",
    out: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Also write the figures as JSON to this file.")
    ] = None,
) -> None:
    """What being watched costs: attached against bare, as ratios from alternating blocks of one run."""
    _needs_torch("bench overhead")
    from surefoot.bench.overhead import main as run

    try:
        typer.echo(run(device, quick=quick, only=only, out=out, say=lambda line: typer.echo(line, err=True)))
    except ValueError as wrong:
        typer.echo(str(wrong), err=True)
        raise typer.Exit(2) from None


@bench.command()
def equal(
    steps: Annotated[int, typer.Option(min=5, help="Updates in all, over five families of models.")] = 20_000,
) -> None:
    """Proof that a healthy run is left alone: attached and bare, bit for bit the same."""
    _needs_torch("bench equal")
    from surefoot.bench.equal import main as run

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
    _needs_torch("bench zoo")
    from surefoot.bench.zoo import Choice
    from surefoot.cli.zoo import show
    from surefoot.zoo.families import Split

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
    from surefoot.bench.logs import main as run
    from surefoot.bench.logspeed import main as timed

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
    from surefoot.bench.speed import judge as measure

    typer.echo(measure())


@bench.command()
def host(
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default what is there.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are timed.")] = 400,
) -> None:
    """Microseconds of the host that being watched adds to a step, part by part, for 75 and 300 tensors."""
    _needs_torch("bench host")
    from surefoot.bench.host import main as run

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
    _needs_torch("bench rewind")
    from surefoot.bench.speed import rewind as measure

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
    folder: Annotated[Path | None, typer.Option(file_okay=False, help="A folder on the disk to write to.")] = None,
) -> None:
    """What a save costs the training beside it, against torch.save and DCP; and a restore."""
    _needs_torch("bench checkpoint")
    from surefoot.bench.checkpoint import main as run

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
    _needs_torch("bench train")
    from surefoot.bench.training import main as run
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
    jobs: Annotated[int, typer.Option(min=0, help="Processes at work; 0 takes one a core.")] = 0,
) -> None:
    """Suspicious but healthy runs, with ever new seeds: is any of them touched? 1 when one is."""
    _needs_torch("bench healthy")
    from surefoot.bench.healthy import main as run
    from surefoot.bench.zoo import cores
    from surefoot.zoo.families import Split

    if split not in list(Split):
        typer.echo(f"bench healthy: --split {split} is unknown. Use {' or '.join(Split)}.", err=True)
        raise typer.Exit(2)

    def tell(done: int, total: int) -> None:
        if done * 20 // total > (done - 1) * 20 // total:
            typer.echo(f"{done} of {total} runs made", err=True)

    tally = run(Split(split), steps=steps, workers=jobs or cores(), progress=tell)
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
    _needs_torch("bench chaos")
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


def _needs_torch(what: str) -> None:
    if importlib.util.find_spec("torch") is None:
        typer.echo(f"{what} trains a model and needs torch: pip install 'surefoot[train,plots]'", err=True)
        raise typer.Exit(2)


def main() -> None:
    """Entry point of the console script."""
    app()
