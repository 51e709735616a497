"""Precision by hardware, optimizer by task, settings by stage."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.plan.hardware import Cluster
from surefoot.plan.model_size import ModelSize
from surefoot.plan.page import PageSection
from surefoot.plan.plan_recipe import GPT3, usual_settings
from surefoot.train.recipe import Recipe

_TINY = 10e6
_HUGE_BATCH = 8192
"""Samples per update from which LAMB was made to keep large batches stable (You et al. 2020)."""


@dataclass(frozen=True, slots=True)
class StageSettings:
    """Usual settings of one stage of training a language model; batch sizes are for a GPU of 24 GB."""

    epochs: str
    batch: str
    lr: float


STAGES = {
    "pretrain": StageSettings("1 to 2", "64 to 128", 5e-4),
    "sft": StageSettings("2 to 5", "32 to 64", 1e-6),
    "lora": StageSettings("10 to 50", "32 to 64", 1e-4),
    "dpo": StageSettings("1 to 2", "8 to 16", 4e-8),
    "ppo": StageSettings("as rewards rise", "as it fits", 8e-8),
}


def best_precision(parameters: int, cluster: Cluster | None) -> tuple[str, str]:
    """The type to compute in, and why."""
    if cluster is None:
        return "float32", "on a CPU, and for the first baseline everywhere"
    gpu = cluster.gpu
    if parameters < _TINY:
        return "float32", f"below {_TINY / 1e6:.0f} M parameters nothing is gained by less"
    if gpu.bfloat16:
        return "bfloat16", f"{gpu.name} has it: the range of float32, so no loss scaling"
    return "float16", f"{gpu.name} is older than Ampere and has no bfloat16; the loss is scaled"


def best_optimizer(task: str, samples: int) -> tuple[str, str]:
    """The optimizer for this task, and why."""
    if samples >= _HUGE_BATCH and task != "language":
        return "lamb", f"{samples:,} samples per update: its updates are scaled layer by layer"
    return {
        "language": ("adamw", "embeddings and attention: gradients differ much in size"),
        "vision": ("sgd", "convolutions: momentum 0.9 generalises at least as well, with half the state"),
    }.get(task, ("adamw", "needs the least tuning"))


def settings_section(
    recipe: Recipe, facts: ModelSize, cluster: Cluster | None, samples: int, stage_name: str
) -> PageSection:
    """Precision, optimizer and settings of the stage as rows, and what to change as recipe lines."""
    section = PageSection("settings", "Settings")
    lines = []
    compute, why = best_precision(facts.parameters, cluster)
    section.add("precision", "precision.compute", compute, compute, why)
    if compute != recipe.precision.compute:
        lines.append(f"precision.compute={compute}")
    name, why = best_optimizer(facts.task, samples)
    section.add("optimizer", "optimizer.name", name, name, f"{facts.task}: {why}")
    if name != recipe.optimizer.name:
        lines.append(f"optimizer.name={name}")
    if facts.task == "language":
        lines += _add_stage(section, recipe, facts, stage_name)
    if lines:
        section.remarks.append("What differs from the recipe:")
    section.lines = lines
    return section


def _add_stage(section: PageSection, recipe: Recipe, facts: ModelSize, name: str) -> list[str]:
    """Rows of the stage of a language model; returns what differs from the recipe."""
    stage = STAGES[name]
    lr, how = stage.lr, f"usual for {name} (--stage names another)"
    if name == "pretrain" and facts.parameters >= _TINY:
        tokens, lr = usual_settings(facts.parameters)
        how = f"{GPT3}, for {tokens / 1e6:g} M tokens per update"
    section.add("lr", "optimizer.lr", lr, f"{lr:g}", how)
    section.add("stage_epochs", "epochs", stage.epochs, stage.epochs, f"usual for {name}")
    section.add("stage_batch", "samples per update", stage.batch, stage.batch, f"usual for {name} on 24 GB")
    differs = recipe.optimizer.lr > 2 * lr or recipe.optimizer.lr < lr / 4
    return [f"optimizer.lr={lr:g}"] if differs else []
