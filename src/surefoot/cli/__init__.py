"""The `surefoot` command; each subcommand imports what it needs when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surefoot import __version__
from surefoot.cli.bench import bench
from surefoot.cli.case_commands import CASES, CASES_EXAMPLES, DATA, DATA_EXAMPLES, cases, data
from surefoot.cli.checkpoint_commands import checkpoints_app
from surefoot.cli.follow_commands import ALARMS, ALARMS_EXAMPLES, WATCH, WATCH_EXAMPLES, alarms, watch
from surefoot.cli.needs import ENGINE, needs_torch
from surefoot.cli.report_command import add_report_command

app = typer.Typer(
    name="surefoot",
    help="Keeps PyTorch training runs alive: refuses bad updates, explains the cause, and recovers the run.",
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
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the run and the plot.")] = Path("out/demo"),
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of model and data.")] = 0,
) -> None:
    """Train a small model through three planted faults, without and with surefoot."""
    needs_torch("demo", *ENGINE)
    from surefoot.demo import show

    show(steps=steps, out=out, seed=seed)


_TRAIN = """Train a model from a recipe, protected by surefoot.

RECIPE is a YAML or JSON file, or the name of a shipped recipe (list them with: surefoot recipes). KEY=VALUE \
overrides any key of it; a list of values sweeps the key, one run per value. Run the same command again to resume.

On several GPUs or machines: torchrun --nproc-per-node 8 -m surefoot train RECIPE

Exit codes: 0 done; 1 the run failed; 2 bad usage; 75 restart me (saved after a signal, or a rank was lost); \
76 do not restart me (surefoot stopped the run and would stop it again).
"""
_TRAIN_EXAMPLES = """Examples:

surefoot train lm-tiny

surefoot train mine.yaml optimizer.lr=3e-4 batch.size=64

surefoot train lm-tiny 'optimizer.lr=[1e-3, 3e-3]' steps=200

surefoot recipes --keys
"""


@app.command(help=_TRAIN, epilog=_TRAIN_EXAMPLES, short_help="Train a model from a recipe.")
def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A file, or the name of a shipped recipe.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the recipe to override.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON at the end.")] = False,
) -> None:
    needs_torch("train", *ENGINE)
    from surefoot.cli.train import show

    raise typer.Exit(show(recipe, overrides or (), as_json=as_json))


_CHECK = """Check a recipe with a short trial before a long run.

Trains about 100 updates with the recipe's own model, data and settings in a temporary folder, and reports memory, \
speed, total time, gradients per layer, a clip threshold, data problems, exact resume and hangs. Also checks the \
training loop itself: causality, labels, loss function, leaks, parameters that are not trained, the learning rate.

With a script that calls surefoot.attach in place of a recipe, runs it up to its first updates and checks its loop.

Exit codes: 0 ready to train; 1 an item failed; 2 bad usage.
"""
_CHECK_EXAMPLES = """Examples:

surefoot check lm-tiny

surefoot check mine.yaml optimizer.lr=3e-4 --steps 30

torchrun --nproc-per-node 8 -m surefoot check mine.yaml

surefoot check train.py -- --batch-size 8
"""


@app.command(help=_CHECK, epilog=_CHECK_EXAMPLES, short_help="Check a recipe with a short trial before a long run.")
def check(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A file, the name of a shipped recipe, or a script.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Keys of the recipe to override.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Updates of the trial; fewer if the recipe has fewer.")] = 100,
    seconds: Annotated[float, typer.Option(min=1, help="Longest training time of the trial.")] = 60.0,
    patience: Annotated[float, typer.Option(min=1, help="Seconds without an update that count as a hang.")] = 600.0,
    schedule: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Only plot the learning rate over the run to this file: .png, .svg."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite the --schedule file even if surefoot did not write it.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as one JSON object.")] = False,
) -> None:
    needs_torch("check", *ENGINE)
    from surefoot.cli.check import show

    trial = {"steps": steps, "seconds": seconds, "patience": patience}
    raise typer.Exit(show(recipe, overrides or (), **trial, as_json=as_json, schedule=schedule, force=force))


_PLAN = """Plan a run before it starts: steps, memory of each GPU, time, cost and settings; needs no GPU and no data.

RECIPE is a file or the name of a shipped recipe; KEY=VALUE overrides a key of it. Without one, --params plans a \
decoder of that size, and the layout and batch that fit are chosen. Every number names its formula or measurement; \
activations are measured with torch's MemTracker on tensors without values.

Exit codes: 0 planned; 2 bad usage.
"""
_PLAN_EXAMPLES = """Examples:

surefoot plan --params 7e9 --seq 4096 --gpus 8x80GB --tokens 1e12

surefoot plan lm-124m batch.size=32 --gpus H100

surefoot plan mine.yaml parallel.strategy=zero3 --gpus 16xA100 --json
"""


@app.command(
    help=_PLAN, epilog=_PLAN_EXAMPLES, short_help="Plan a run before it starts: steps, memory, time, cost, settings."
)
def plan(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[RECIPE] [KEY=VALUE]...", help="A recipe, and keys of it to override."),
    ] = None,
    params: Annotated[str | None, typer.Option(help="Without a recipe: parameters of a decoder, as 7e9 or 7B.")] = None,
    seq: Annotated[int | None, typer.Option(min=2, help="Tokens per sample.")] = None,
    gpus: Annotated[str | None, typer.Option(help="Such as 8x80GB, 8xH100 or 2x24GB.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens to train on, as 1e12 or 300B.")] = None,
    stage: Annotated[
        str, typer.Option(help="pretrain, sft, lora, dpo or ppo: usual settings of this stage.")
    ] = "pretrain",
    mfu: Annotated[float, typer.Option(min=0.01, max=1, help="Share of the GPU's peak FLOP/s that is reached.")] = 0.4,
    price: Annotated[float | None, typer.Option(min=0, help="Price of a GPU-hour.")] = None,
    network: Annotated[str, typer.Option(help="Bytes per second from a GPU to another node.")] = "50GB",
    per_node: Annotated[int, typer.Option(min=1, help="GPUs of a node.")] = 8,
    mtbf_hours: Annotated[float, typer.Option(min=1, help="Hours between failures of one GPU.")] = 50_000.0,
    disk: Annotated[str, typer.Option(help="Bytes per second to the checkpoints' disk.")] = "1GB",
    check: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Calibrate by this report of surefoot check --json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as one JSON object.")] = False,
) -> None:
    needs_torch("plan", *ENGINE)
    from surefoot.cli.plan import PlanOptions, show

    options = PlanOptions(
        params=params,
        seq=seq,
        gpus=gpus,
        tokens=tokens,
        stage=stage,
        mfu=mfu,
        price=price,
        network=network,
        per_node=per_node,
        mtbf_hours=mtbf_hours,
        disk=disk,
        check=check,
        as_json=as_json,
    )
    raise typer.Exit(show(arguments or (), options))


_DIAGNOSE = """Find out from any training log what went wrong, when it began and what to do; needs no torch.

PATH is a log of any trainer (Hugging Face, Lightning, Keras, nanoGPT, Megatron, ...), as JSON, JSONL, CSV, \
TensorBoard, W&B or console text; a checkpoint; a run directory or any folder with logs; or - for standard input.

Exit codes: 0 healthy, or too little data to tell; 1 trouble found; 2 cannot be read, or bad usage.
"""
_DIAGNOSE_EXAMPLES = """Examples:

surefoot diagnose train.log

surefoot diagnose trainer_state.json --html answer.html

surefoot diagnose --compare old.csv new.csv

surefoot diagnose --follow train.log || ./stop-the-job.sh
"""


@app.command(
    help=_DIAGNOSE, epilog=_DIAGNOSE_EXAMPLES, short_help="Find out from any training log what went wrong, and why."
)
def diagnose(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH", help="A log, checkpoint or folder; - for standard input.")
    ],
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the diagnosis as JSON; a list for several paths.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Also plot to this file: .png, .svg or .pdf.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Also write a self-contained HTML page to this file.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite the --plot and --html files even if surefoot did not write them.")
    ] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Compare two logs.")] = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep reading as the log grows; exit 1 when the run fails.")
    ] = False,
    on: Annotated[str, typer.Option(help="With --follow: exit on failed, or already on warning.")] = "failed",
    timeout: Annotated[
        float | None, typer.Option(min=0, help="With --follow: exit after this many seconds without a new line.")
    ] = None,
    step: Annotated[str, typer.Option(metavar="NAME", help="The column with the step.")] = "",
    loss: Annotated[str, typer.Option(metavar="NAME", help="The column with the training loss.")] = "",
    eval_loss: Annotated[str, typer.Option(metavar="NAME", help="The column with the eval loss.")] = "",
    grad_norm: Annotated[str, typer.Option(metavar="NAME", help="The column with the gradient norm.")] = "",
    lr: Annotated[str, typer.Option(metavar="NAME", help="The column with the learning rate.")] = "",
    scale: Annotated[str, typer.Option(metavar="NAME", help="The column with the float16 loss scale.")] = "",
    old_norm: Annotated[str, typer.Option("--norm", hidden=True, help="Old spelling of --grad-norm.")] = "",
    old_rate: Annotated[str, typer.Option("--rate", hidden=True, help="Old spelling of --lr.")] = "",
) -> None:
    from surefoot.cli.diagnose import DiagnoseOptions, show

    roles = {
        "step": step,
        "loss": loss,
        "eval_loss": eval_loss,
        "norm": grad_norm or old_norm,
        "rate": lr or old_rate,
        "scale": scale,
    }
    options = DiagnoseOptions(
        as_json=as_json,
        compare=compare,
        columns={role: name for role, name in roles.items() if name},
        plot=plot,
        html=html,
        force=force,
        follow=follow,
        on=on,
        timeout=timeout,
    )
    raise typer.Exit(show(paths, options))


_REPLAY = """Replay an incident on this machine: the updates that led to it, and the branches of its trial.

INCIDENT is a folder in RUN/incidents/, perhaps from another machine, of a run that `surefoot train` made. Its model \
and optimizer are built from its recipe; the training data is not needed. For a training loop of your own, call \
surefoot.replay(path, model, optimizer, step_fn).

Exit codes: 0 all numbers are exactly as recorded; 1 they differ; 2 it cannot be replayed, or bad usage.
"""
_REPLAY_EXAMPLES = """Examples:

surefoot replay runs/lm-tiny/incidents/00000120-rewind

surefoot replay 00000120-rewind --recipe mine.yaml --json
"""


@app.command(help=_REPLAY, epilog=_REPLAY_EXAMPLES, short_help="Replay an incident, on any machine.")
def replay(
    incident: Annotated[Path, typer.Argument(metavar="INCIDENT", help="A folder in RUN/incidents/.")],
    recipe: Annotated[
        str | None, typer.Option(metavar="RECIPE", help="The recipe, if it names a model or loss of your own.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")] = "cpu",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    needs_torch("replay", *ENGINE)
    from surefoot.cli.replay_page import show

    raise typer.Exit(show(incident, recipe=recipe, device=device, as_json=as_json))


_RECIPES = """List the shipped recipes, copy one to edit, or explain every key; needs no torch.

Exit codes: 0 fine; 2 bad usage. An existing file is never overwritten.
"""
_RECIPES_EXAMPLES = """Examples:

surefoot recipes

surefoot recipes lm-tiny --to mine.yaml

surefoot recipes --keys

surefoot recipes optimizer --keys
"""


@app.command(help=_RECIPES, epilog=_RECIPES_EXAMPLES, short_help="List or copy the shipped recipes, explain every key.")
def recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="The recipe to print; with --keys a section, as optimizer.")
    ] = None,
    to: Annotated[Path | None, typer.Option(help="Copy it, with its comments, to this new file or folder.")] = None,
    keys: Annotated[bool, typer.Option("--keys", help="Every key with its type, default and meaning.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON; a recipe with all defaults.")] = False,
) -> None:
    from surefoot.cli.recipes import RecipesOptions, show

    raise typer.Exit(show(name, RecipesOptions(as_json=as_json, to=to, keys=keys)))


add_report_command(app)
app.command(help=WATCH, epilog=WATCH_EXAMPLES, short_help="Watch a run while it trains, here or on a web page.")(watch)
app.command(help=ALARMS, epilog=ALARMS_EXAMPLES, short_help="Follow a run and send alarms about it.")(alarms)
app.command(help=CASES, epilog=CASES_EXAMPLES, short_help="List the incidents of many runs, and what helped.")(cases)
app.command(help=DATA, epilog=DATA_EXAMPLES, short_help="List, lift or add the banned samples of a run.")(data)
app.add_typer(checkpoints_app, name="checkpoints")
app.add_typer(bench, name="bench")


def main() -> None:
    """Entry point of the console script."""
    app()
