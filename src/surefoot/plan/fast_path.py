"""The way from a float32 baseline to the fast configuration, one change at a time, as recipe lines to paste."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from surefoot.plan.hardware import Cluster
from surefoot.plan.memory_plan import MemoryPlanner
from surefoot.plan.model_size import ModelSize
from surefoot.plan.page import PageSection, format_bytes
from surefoot.plan.plan_recipe import replaced
from surefoot.plan.settings_advice import best_precision
from surefoot.train.recipe import Recipe


@dataclass(frozen=True, slots=True)
class PathStep:
    """One change, with the recipe and the memory that it leads to."""

    recipe: Recipe
    lines: str
    why: str
    total: int
    fits: bool | None


_BASELINE: dict[str, Any] = {
    "precision_compute": "float32",
    "speed_compile": False,
    "speed_checkpoint_activations": 0,
    "speed_attention": "auto",
    "batch_size": 1,
}


def fast_path(recipe: Recipe, planner: MemoryPlanner, cluster: Cluster) -> list[PathStep]:
    """From float32 and one sample per pass to the planned recipe; each step adds one change to those before it."""
    per_rank = recipe.batch.size * recipe.batch.accumulate
    steps: list[PathStep] = []
    baseline = _BASELINE | {"batch_accumulate": per_rank}
    current = replaced(recipe, **baseline)
    _add(steps, current, planner, cluster, _lines(baseline), "the baseline: slow, exact")
    for settings, why in _changes(recipe, planner.facts, cluster, per_rank):
        current = replaced(current, **settings)
        _add(steps, current, planner, cluster, _lines(settings), why)
    return steps


def _changes(recipe: Recipe, facts: ModelSize, cluster: Cluster, per_rank: int) -> list[tuple[dict[str, Any], str]]:
    compute = recipe.precision.compute
    if compute == "float32":
        compute, _ = best_precision(facts.parameters, cluster)
    found: list[tuple[dict[str, Any], str]] = []
    gpu = cluster.gpu
    if gpu.tf32:
        ratio = gpu.tf32 / gpu.float32
        found.append(({"precision_compute": "tf32"}, f"peak x {ratio:.3g}; the loss should not change visibly"))
    if compute in ("bfloat16", "float16"):
        ratio = gpu.peak(compute) / gpu.peak("tf32" if gpu.tf32 else "float32")
        found.append(({"precision_compute": compute}, f"peak x {ratio:.3g}; compare the first 100 losses with float32"))
    every = recipe.speed.checkpoint_activations
    if every:
        found.append(({"speed_checkpoint_activations": every}, "memory for time; the losses stay equal"))
    if recipe.batch.size > 1:
        settings = {"batch_size": recipe.batch.size, "batch_accumulate": max(1, per_rank // recipe.batch.size)}
        found.append((settings, "larger products; the effective batch and the losses stay the same"))
    found.append(({"speed_compile": True}, "fused kernels; fewer activations are kept than planned here"))
    return found


def _add(steps: list[PathStep], recipe: Recipe, planner: MemoryPlanner, cluster: Cluster, lines: str, why: str) -> None:
    total = planner.plan(recipe, cluster.gpus).total
    steps.append(PathStep(recipe, lines, why, total, total <= cluster.gpu.memory))


def _lines(settings: dict[str, Any]) -> str:
    words = []
    for name, value in settings.items():
        section, _, key = name.partition("_")
        words.append(f"{section}.{key}={str(value).lower() if isinstance(value, bool) else value}")
    return " ".join(words)


def path_section(steps: list[PathStep]) -> PageSection:
    """Every step as lines to paste, with its memory."""
    section = PageSection("path", "From the float32 baseline to the fast configuration")
    for number, step in enumerate(steps):
        fits = "" if step.fits is None else ", fits" if step.fits else ", does not fit"
        how = f"{step.lines}: {step.why}{fits}"
        section.add(f"step_{number}", f"step {number}", step.total, format_bytes(step.total), how)
    section.remarks.append(
        "Make one change at a time, train 100 updates with the same seed, and keep it if the loss follows the baseline."
    )
    if steps[0].fits is False:
        section.remarks.append("Where the baseline does not fit, make it with fewer layers (model.layers).")
    recipe = steps[-1].recipe
    section.remarks.append("The fast configuration, to paste into a recipe:")
    section.lines = [
        "precision:",
        f"  compute: {recipe.precision.compute}",
        "batch:",
        f"  size: {recipe.batch.size}",
        f"  accumulate: {recipe.batch.accumulate}",
        "speed:",
        f"  compile: {str(recipe.speed.compile).lower()}",
        f"  checkpoint_activations: {recipe.speed.checkpoint_activations}",
        "parallel:",
        f"  strategy: {recipe.parallel.strategy}",
    ]
    return section
