"""The `surefoot` command; each sub-command imports what it needs when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surefoot import __version__
from surefoot.cli.bench import bench
from surefoot.cli.needs import ENGINE, needs_torch

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
    needs_torch("demo", *ENGINE)
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
    needs_torch("train", *ENGINE)
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
    schedule: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Only draw the rate over the run into this file: .png, .svg.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace the file named by --schedule, whatever it holds.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answers as one JSON object.")] = False,
) -> None:
    needs_torch("check", *ENGINE)
    from surefoot.cli.check import show

    wishes = {"steps": steps, "seconds": seconds, "patience": patience}
    raise typer.Exit(show(recipe, overrides or (), **wishes, as_json=as_json, schedule=schedule, force=force))


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
    force: Annotated[
        bool, typer.Option("--force", help="Replace the files named by --plot and --html, whatever they hold.")
    ] = False,
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
    written = {"plot": plot, "html": html, "force": force}
    followed = {"follow": follow, "on": on, "timeout": timeout}
    wishes = Wishes(as_json=as_json, compare=compare, columns=columns, **written, **followed)
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


app.add_typer(bench, name="bench")


def main() -> None:
    """Entry point of the console script."""
    app()
