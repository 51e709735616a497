"""What a finished run has to show: text that the model wrote, and a picture of its loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from surefoot import parallel
from surefoot.journal.output_files import save_figure
from surefoot.journal.reader import Run, read
from surefoot.models import generate
from surefoot.parallel import World
from surefoot.records import Verdict
from surefoot.train.build import Parts

MEAN_OF = 20
"""Updates whose mean loss is told at the end."""


def last_losses(run_dir: Path) -> tuple[float | None, float | None]:
    """What a run that ended earlier came to: the mean loss of its last updates, and the last on held-out data."""
    run = read(run_dir)
    evaluations = [event["values"]["eval_loss"] for event in run.events if "eval_loss" in event.get("values", {})]
    return finite_mean(_applied_losses(run)), (evaluations[-1] if evaluations else None)


def finite_mean(losses: Sequence[float] | NDArray[np.floating]) -> float | None:
    """The mean of those of the last `MEAN_OF` losses that are finite: NaN if none is, None if there are none."""
    last = np.asarray(losses, dtype=np.float64)[-MEAN_OF:]
    finite = last[np.isfinite(last)]
    if not len(finite):
        return math.nan if len(last) else None
    return float(finite.mean())


def _applied_losses(run: Run) -> NDArray[np.floating]:
    """The losses of the updates that changed the weights and were not undone by a rewind, in their order."""
    if not run.scalars.rows:
        return np.empty(0)
    verdicts, steps, losses = (np.asarray(run.scalars[name]) for name in ("verdict", "step", "loss"))
    config = run.info.get("config") or {}
    observed = (config.get("policy") or {}).get("observe", False)  # then only loss scaling keeps updates back
    applied = ~np.isin(verdicts, (Verdict.OVERFLOW, Verdict.DISCARDED)) if observed else verdicts == Verdict.APPLIED
    steps, losses = steps[applied], losses[applied]
    # A row whose step number comes again later was undone, or belongs to a further optimizer of the same step.
    later = np.append(np.minimum.accumulate(steps[::-1])[::-1][1:], np.inf)[: len(steps)]
    return losses[steps < later]


def shown(parts: Parts, run_dir: Path) -> dict[str, str]:
    """All of it; nothing that goes wrong here harms a run that is finished."""
    told: dict[str, str] = {}
    for what, show in (("it writes", lambda: written(parts)), ("picture", lambda: picture(run_dir, parts.world))):
        try:
            told |= show()
        except Exception as error:
            told[what] = f"nothing, because of {type(error).__name__}: {error}"
    return told


def written(parts: Parts) -> dict[str, str]:
    """Text that the model writes when it is asked to; all processes take part where the model is spread over them."""
    sample, tokenizer = parts.recipe.sample, parts.data.tokenizer
    if not sample.tokens or tokenizer is None:
        return {}
    prompt = tokenizer.encode(sample.prompt) or [0]
    model = (
        parts.model
        if parallel.shards_weights(parts.recipe.parallel.how, parts.world)
        else parallel.unwrap_model(parts.model)
    )
    model.eval()
    with parts.precision.forward():
        tokens = generate(
            model,
            prompt,
            max_new_tokens=sample.tokens,
            context=parts.recipe.data.context,
            device=parts.world.device,
            temperature=sample.temperature,
            seed=parts.recipe.seed,
        )
    model.train()
    return {"it writes": "\n" + tokenizer.decode(tokens)}


def picture(run_dir: Path, world: World) -> dict[str, str]:
    """The loss over the run, drawn where matplotlib is there."""
    if not world.is_main or not (run_dir / "signals").exists():
        return {}
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return {}
    run = read(run_dir)
    steps, losses = run.scalars["attempt"], run.scalars["loss"]
    known = np.isfinite(losses)
    if known.sum() < 2:
        return {}
    figure = Figure(figsize=(9, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.plot(steps[known], losses[known], color="#9fb8bd", lw=0.8)
    width = max(1, int(known.sum()) // 50)
    smooth = np.convolve(losses[known], np.ones(width) / width, mode="valid")
    axes.plot(steps[known][width - 1 :], smooth, color="#14606b", lw=1.8)
    for event in run.events:
        if event["kind"] == "note" and event.get("name") == "rewound":
            axes.axvline(event["attempt"], color="#d1495b", lw=0.8, ls=":")
    axes.set(xlabel="update", ylabel="training loss")
    if losses[known].min() > 0 and losses[known].max() > 20 * losses[known].min():
        axes.set_yscale("log")
    axes.spines[["top", "right"]].set_visible(False)
    path = run_dir / "loss.png"
    save_figure(figure, path, force=None)
    return {"picture": str(path)}
