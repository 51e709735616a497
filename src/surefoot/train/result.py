"""The result of a run: its summary, final losses, a text sample and a plot of the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from surefoot import parallel
from surefoot.journal.output_files import save_figure
from surefoot.journal.reader import Run, read
from surefoot.models import generate
from surefoot.parallel import World
from surefoot.records import Verdict
from surefoot.sinks.progress import format_duration
from surefoot.train import exit_codes
from surefoot.train.build import RunParts

FINAL_UPDATES = 20
"""The final loss is the mean over this many last updates."""


@dataclass(slots=True)
class RunResult:
    """How a run ended."""

    name: str
    run_dir: Path
    code: int = exit_codes.FAILED
    error: str = ""
    """Why it failed; empty when it did not."""
    step: int = 0
    refused: int = 0
    """How many of these updates changed nothing."""
    loss: float | None = None
    eval_loss: float | None = None
    seconds: float = 0.0
    is_first: bool = True
    """Whether this is the first rank, which prints for all."""
    unreadable: int = 0
    """Samples that were skipped."""
    memory: str | None = None
    """How the run was fitted into memory, if it ever ran out."""
    extras: dict[str, str] = field(default_factory=dict)
    """Further lines of the summary: text sample, plot."""

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "run_dir": str(self.run_dir),
            "code": self.code,
            "ended": exit_codes.explain(self.code),
            "why": self.error,
            "step": self.step,
            "refused": self.refused,
            "unreadable": self.unreadable,
            "memory": self.memory,
            "loss": _finite_or_none(self.loss),
            "held_out": _finite_or_none(self.eval_loss),
            "seconds": self.seconds,
        }

    def as_table_row(self) -> tuple[str, ...]:
        """One row of the table that compares the runs of a sweep."""
        losses = ("-" if loss is None else f"{loss:.4f}" for loss in (self.loss, self.eval_loss))
        ended = self.error or exit_codes.explain(self.code)
        return self.name, f"{self.step:,}", *losses, format_duration(self.seconds), ended

    def summary(self) -> dict[str, str]:
        """The lines printed at the end of a successful run."""
        refused = f", {self.refused:,} of them refused" if self.refused else ""
        lines = {"done": f"{self.step:,} updates{refused}"}
        if self.unreadable:
            lines["unreadable"] = f"{self.unreadable:,} samples were skipped"
        if self.memory is not None:
            lines["memory"] = self.memory
        if self.loss is not None:
            mean = f"{self.loss:.4f}, the mean of the last updates"
            lines["loss"] = "not finite in any of the last updates" if math.isnan(self.loss) else mean
        if self.eval_loss is not None:
            lines["eval loss"] = f"{self.eval_loss:.4f}"
        return lines | self.extras


def final_losses(run_dir: Path) -> tuple[float | None, float | None]:
    """Of a finished run: the mean training loss of its last updates, and its last eval loss."""
    run = read(run_dir)
    evaluations = [event["values"]["eval_loss"] for event in run.events if "eval_loss" in event.get("values", {})]
    return finite_mean(_applied_losses(run)), (evaluations[-1] if evaluations else None)


def finite_mean(losses: Sequence[float] | NDArray[np.floating]) -> float | None:
    """The mean of the finite ones among the last `FINAL_UPDATES` losses; NaN if none is finite, None without losses."""
    last = np.asarray(losses, dtype=np.float64)[-FINAL_UPDATES:]
    finite = last[np.isfinite(last)]
    if not len(finite):
        return math.nan if len(last) else None
    return float(finite.mean())


def _applied_losses(run: Run) -> NDArray[np.floating]:
    """Losses, in order, of the updates that changed the weights and that no rewind undid."""
    if not run.scalars.rows:
        return np.empty(0)
    verdicts, steps, losses = (np.asarray(run.scalars[name]) for name in ("verdict", "step", "loss"))
    config = run.info.get("config") or {}
    observed = (config.get("policy") or {}).get("observe", False)  # then only loss scaling skips updates
    applied = ~np.isin(verdicts, (Verdict.OVERFLOW, Verdict.DISCARDED)) if observed else verdicts == Verdict.APPLIED
    steps, losses = steps[applied], losses[applied]
    # A row whose step number comes again later was undone, or belongs to a further optimizer of the same step.
    next_lowest = np.append(np.minimum.accumulate(steps[::-1])[::-1][1:], np.inf)[: len(steps)]
    return losses[steps < next_lowest]


def summary_extras(parts: RunParts, run_dir: Path) -> dict[str, str]:
    """The text sample and the plot; an error here does not fail a finished run."""
    extras: dict[str, str] = {}
    for name, make in (("sample", lambda: text_sample(parts)), ("plot", lambda: plot_loss(run_dir, parts.world))):
        try:
            extras |= make()
        except Exception as error:
            extras[name] = f"none, because of {type(error).__name__}: {error}"
    return extras


def text_sample(parts: RunParts) -> dict[str, str]:
    """Text generated by the model; every rank takes part where the model is sharded."""
    sample, tokenizer = parts.recipe.sample, parts.data.tokenizer
    if not sample.tokens or tokenizer is None:
        return {}
    prompt = tokenizer.encode(sample.prompt) or [0]
    is_sharded = parallel.shards_weights(parts.recipe.parallel.strategy, parts.world)
    model = parts.model if is_sharded else parallel.unwrap_model(parts.model)
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
    return {"sample": "\n" + tokenizer.decode(tokens)}


def plot_loss(run_dir: Path, world: World) -> dict[str, str]:
    """Plot the loss over the run to `loss.png`, if matplotlib is installed."""
    if not world.is_main or not (run_dir / "signals").exists():
        return {}
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return {}
    run = read(run_dir)
    attempts, losses = run.scalars["attempt"], run.scalars["loss"]
    finite = np.isfinite(losses)
    if finite.sum() < 2:
        return {}
    figure = Figure(figsize=(9, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.plot(attempts[finite], losses[finite], color="#9fb8bd", lw=0.8)
    window = max(1, int(finite.sum()) // 50)
    smooth = np.convolve(losses[finite], np.ones(window) / window, mode="valid")
    axes.plot(attempts[finite][window - 1 :], smooth, color="#14606b", lw=1.8)
    for event in run.events:
        if event["kind"] == "note" and event.get("name") == "rewound":
            axes.axvline(event["attempt"], color="#d1495b", lw=0.8, ls=":")
    axes.set(xlabel="update", ylabel="training loss")
    if losses[finite].min() > 0 and losses[finite].max() > 20 * losses[finite].min():
        axes.set_yscale("log")
    axes.spines[["top", "right"]].set_visible(False)
    path = run_dir / "loss.png"
    save_figure(figure, path, force=None)
    return {"plot": str(path)}


def _finite_or_none(value: float | None) -> float | None:
    """JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None
