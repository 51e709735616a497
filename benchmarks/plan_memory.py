"""`surefoot bench plan`: the memory that `surefoot plan` predicts against the peak of a real step on a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.overhead import describe_machine
from surefoot.plan.fake_step import language_batch, mean_loss
from surefoot.plan.memory_plan import MemoryPlanner, MemorySplit
from surefoot.plan.model_size import model_size
from surefoot.train import speed
from surefoot.train.accumulation import to_device
from surefoot.train.factories import find_factory
from surefoot.train.make_model import make_model
from surefoot.train.mixed_precision import Precision
from surefoot.train.optimizers import make_optimizers
from surefoot.train.recipe import Recipe, load

SETTINGS: tuple[tuple[str, ...], ...] = (
    ("lm-124m", "batch.size=16", "speed.compile=false"),
    ("lm-124m", "batch.size=64", "speed.compile=false"),
    ("lm-124m", "batch.size=16", "speed.compile=true"),
    ("lm-124m", "batch.size=16", "speed.compile=false", "precision.compute=float32"),
    ("lm-124m", "batch.size=16", "speed.compile=false", "precision.compute=float16"),
    ("lm-124m", "batch.size=16", "speed.compile=false", "speed.checkpoint_activations=1"),
    ("lm-124m", "batch.size=16", "speed.compile=false", "speed.checkpoint_activations=2"),
    ("lm-124m", "batch.size=16", "speed.compile=false", "batch.accumulate=2"),
    ("lm-124m", "batch.size=16", "speed.compile=false", "optimizer.name=sgd"),
    ("lm-124m", "batch.size=4", "speed.compile=false", "optimizer.name=nadam"),
    ("lm-124m", "batch.size=4", "speed.compile=false", "optimizer.name=muon"),
    ("lm-124m", "batch.size=16", "speed.compile=false", "speed.attention=math"),
    ("lm-1b", "batch.size=4", "speed.compile=false"),
    ("lm-1b", "batch.size=16", "speed.compile=false"),
    ("lm-1b", "batch.size=8", "speed.compile=true"),
    ("lm-1b", "batch.size=8", "speed.compile=false", "speed.checkpoint_activations=1"),
    ("lm-1b", "batch.size=2", "speed.compile=false", "precision.compute=float32"),
    ("lm-1b", "batch.size=2", "speed.compile=false", "optimizer.name=sgd"),
)
"""Recipes with overrides; none was used to choose a constant of the plan."""
_STEPS = 3
"""The first makes the optimizer's state and compiles; the peak is that of the others."""
NO_GPU = "bench plan: there is no GPU here to compare with; run it on one (surefoot plan itself needs none)."
WITHIN, UNDER = 0.10, 0.05
"""The error that counts as right, and by how much a plan may be too low."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Planned and measured bytes of one setting; `error` says why it could not be run."""

    setting: str
    planned: MemorySplit
    allocated: int = 0
    reserved: int = 0
    error: str = ""

    @property
    def ratio(self) -> float:
        """Planned to measured, of what torch has allocated."""
        return self.planned.allocated / self.allocated

    @property
    def reserved_ratio(self) -> float:
        """The same with fragmentation, which is what has to fit."""
        return (self.planned.total - self.planned.context) / self.reserved


def main(only: str, say: Callable[[str], None]) -> str:
    """Compare every setting whose name contains `only`; ValueError without a GPU."""
    if not torch.cuda.is_available():
        raise ValueError(NO_GPU)
    chosen = [setting for setting in SETTINGS if only in " ".join(setting)]
    if not chosen:
        raise ValueError(f"bench plan: no setting contains {only!r}")
    rows = []
    for setting in chosen:
        rows.append(compare(load(setting[0], list(setting[1:]))[0], " ".join(setting)))
        say(_line(rows[-1]))
    return report(rows, describe_machine("cuda"))


def compare(recipe: Recipe, name: str) -> Comparison:
    """Plan one setting, then train a few steps of it."""
    planned = MemoryPlanner(model_size(recipe)).plan(recipe, ranks=1)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        _train(recipe, torch.device("cuda"))
    except torch.cuda.OutOfMemoryError:
        return Comparison(name, planned, error="out of memory")
    return Comparison(name, planned, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


def _train(recipe: Recipe, device: torch.device) -> None:
    """Some steps as `surefoot train` makes them, without the guard."""
    speed.configure_torch(recipe.speed, device, recipe.precision.compute)
    model = make_model(recipe)
    precision = Precision(recipe.precision, device)
    precision.prepare(model)
    speed.checkpoint_activations(model, recipe.speed.checkpoint_activations)
    model.to(device).train()
    forward: Any = speed.compiled(model, recipe.speed.compile)
    optimizers = make_optimizers(model, recipe.optimizer)
    loss_function = find_factory("loss.factory", recipe.loss.factory)
    with speed.attention(recipe.speed):
        for number in range(_STEPS):
            if number == 1:
                torch.cuda.reset_peak_memory_stats()
            for _ in range(recipe.batch.accumulate):
                batch = to_device(language_batch(recipe)(), device)
                with precision.forward():
                    loss = mean_loss(loss_function, forward, batch)
                (loss if precision.scaler is None else precision.scaler.scale(loss)).backward()
            for optimizer in optimizers:
                optimizer.step() if precision.scaler is None else precision.scaler.step(optimizer)
                optimizer.zero_grad()
            if precision.scaler is not None:
                precision.scaler.update()


def _line(row: Comparison) -> str:
    if row.error:
        return f"| {row.setting} | {row.planned.allocated / 1e9:.2f} | {row.error} | | | |"
    return (
        f"| {row.setting} | {row.planned.allocated / 1e9:.2f} | {row.allocated / 1e9:.2f} | {row.ratio:.3f} | "
        f"{row.reserved / 1e9:.2f} | {row.reserved_ratio:.3f} |"
    )


def report(rows: list[Comparison], machine: str) -> str:
    """The table as Markdown, and how many settings are right."""
    measured = [row for row in rows if not row.error]
    right = sum(abs(row.ratio - 1) <= WITHIN for row in measured)
    low = sum(row.reserved_ratio < 1 - UNDER for row in measured)
    summary = f"{right} of {len(measured)} within {WITHIN:.0%} of the allocated peak; "
    summary += f"{low} more than {UNDER:.0%} below the reserved peak."
    return "\n".join(
        [
            f"{machine}; GB, one GPU, without the guard",
            "",
            "| setting | planned | peak allocated | ratio | peak reserved | ratio with fragmentation |",
            "|---|---|---|---|---|---|",
            *map(_line, rows),
            "",
            summary,
        ]
    )
