"""What is wrong between keys that are each right, and what is right but should be said."""

from __future__ import annotations

from collections.abc import Iterator

from surefoot.train.recipe.figures import wrong_figures
from surefoot.train.recipe.mistakes import Mistake
from surefoot.train.recipe.schema import Data, Recipe


def crossed(recipe: Recipe) -> list[Mistake]:
    """Mistakes that only show when two keys are seen together."""
    return [*_length(recipe), *_data(recipe.data), *_context(recipe), *_optimizer(recipe), *_protection(recipe)]


def remarks(recipe: Recipe) -> list[str]:
    """What will run as asked, but may not be what was wanted."""
    return list(_remarks(recipe))


def _length(recipe: Recipe) -> Iterator[Mistake]:
    if recipe.steps is None and recipe.epochs is None:
        yield Mistake(("steps",), "missing; say how long to train, with `steps: 1000` or `epochs: 1`")
    if recipe.steps is not None and recipe.epochs is not None:
        yield Mistake(("epochs",), "steps is given too; keep one of the two, or set the other to null")
    warmup = recipe.schedule.warmup
    if recipe.steps is not None and warmup >= 1 and warmup > recipe.steps:
        what = (
            f"{warmup:g} updates of warmup are more than the run's {recipe.steps} steps; below 1 it is a share, as 0.05"
        )
        yield Mistake(("schedule", "warmup"), what)


def _data(data: Data) -> Iterator[Mistake]:
    """Data that was named but would not be read is never what was meant."""
    files = data.kind in ("text", "tokens", "chat")
    if files and not data.path:
        yield Mistake(("data", "path"), f"missing; kind {data.kind} reads files: name them, as `path: [corpus.txt]`")
    if data.kind == "own" and data.dataset is None:
        yield Mistake(("data", "dataset"), "missing; kind own needs module:name of what makes the dataset")
    for name in ("path", "held_out_path"):
        if getattr(data, name) and not files:
            yield Mistake(("data", name), f"kind {data.kind} reads no files; set data.kind to text, tokens or chat")
    for name in ("dataset", "held_out_dataset", "collate"):
        if getattr(data, name) is not None and data.kind != "own":
            yield Mistake(("data", name), f"kind {data.kind} does not use it; set data.kind to own")


def _context(recipe: Recipe) -> Iterator[Mistake]:
    reads = recipe.model.arguments.get("context")
    if isinstance(reads, int) and recipe.data.kind != "own" and recipe.data.context > reads:
        what = f"samples have {recipe.data.context} tokens, the model reads {reads}; raise model.context or lower this"
        yield Mistake(("data", "context"), what)


def _optimizer(recipe: Recipe) -> Iterator[Mistake]:
    betas = recipe.optimizer.betas or ()
    if not all(0 <= beta < 1 for beta in betas):
        yield Mistake(("optimizer", "betas"), f"expected two numbers from 0 to below 1, got {list(betas)}")


def _protection(recipe: Recipe) -> Iterator[Mistake]:
    clip = recipe.protection.clip
    if isinstance(clip, float) and clip <= 0:
        yield Mistake(("protection", "clip"), f"expected a number above 0, adaptive, or null for none, got {clip:g}")
    yield from wrong_figures(recipe)


def _remarks(recipe: Recipe) -> Iterator[str]:
    data, schedule = recipe.data, recipe.schedule
    if recipe.precision.compute == "float16" and recipe.device == "cpu":
        yield "float16 on the CPU is slow and overflows early; precision.compute=bfloat16 or float32 is better there."
    if recipe.precision.compute == "tf32" and recipe.device == "cpu":
        yield "tf32 is a format of GPUs; on the CPU it is float32."
    unheld = not (data.held_out or data.held_out_path or data.held_out_dataset)
    if recipe.evaluation.every and unheld:
        yield "Nothing is held out (data.held_out=0), so nothing is evaluated."
    if recipe.steps and schedule.name == "step" and schedule.every >= recipe.steps:
        yield f"schedule.every={schedule.every:g} is past the end of the run: the rate never steps down."
    if schedule.start > recipe.optimizer.lr:
        yield f"The warmup begins at {schedule.start:g}, above the peak of {recipe.optimizer.lr:g}: the rate falls."
    if recipe.protection.policy == "off":
        yield "protection.policy is off: nothing watches, clips or saves this run."
    if recipe.protection.policy == "observe":
        yield "protection.policy is observe: nothing is clipped or saved, so the same command begins anew."
