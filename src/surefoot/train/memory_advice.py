"""What a run needs that does not fit into memory, and which lines of its recipe to change."""

from __future__ import annotations

import torch

from surefoot import parallel
from surefoot.train.build import RunParts
from surefoot.train.make_model import bytes_needed, free_memory


def needed(parts: RunParts) -> str:
    """The sizes that are known, and the recipe lines that lower them."""
    recipe, world = parts.recipe, parts.world
    model = parallel.unwrap_model(parts.model)
    fixed, free = bytes_needed(model, recipe, world), free_memory(world.device)
    where = "the GPU" if world.device.type == "cuda" else "this machine"
    same_run: list[str] = []
    if recipe.protection.snapshot_memory is not False:
        same_run.append("protection.snapshot_memory=false (no snapshots to rewind to)")
    if recipe.parallel.strategy != "zero3":
        same_run.append("parallel.strategy=zero3 on several GPUs")
    new_run = [f"data.context below {recipe.data.context}"] if recipe.data.kind != "own" else ["shorter samples"]
    if parts.precision.compute is torch.float32:
        new_run.append("precision.compute=bfloat16")
    new_run.append("a smaller model")
    return (
        f"Weights, gradients and moments take {fixed / 1e9:.2f} GB, the activations of one sample come on top, and "
        f"{where} has {free / 1e9:.2f} GB free now. To continue this run: a machine with more memory, "
        f"{', '.join(same_run)}. In a new run: {', '.join(new_run)}."
    )
