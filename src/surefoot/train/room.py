"""Whether a model fits into memory, found out before it is made."""

from __future__ import annotations

import os

import torch
from torch import nn

from surefoot.parallel import World
from surefoot.train.recipe.mistakes import RecipeError
from surefoot.train.recipe.schema import Recipe

_MOMENTS = {"sgd": 1, "lars": 1, "adagrad": 1, "rmsprop": 1}
"""Values an optimizer keeps for each weight; the others keep two."""


def bytes_needed(model: nn.Module, recipe: Recipe, world: World) -> int:
    """Bytes for weights, gradients and moments on one process; activations come on top."""
    weights = sum(4 * p.numel() for p in model.parameters())
    trained = sum(4 * p.numel() for p in model.parameters() if p.requires_grad)
    held = {"weights": weights, "gradients": trained}
    held["moments"] = trained * _MOMENTS.get(recipe.optimizer.name.lower(), 2)
    shared = {"zero1": ("moments",), "zero2": ("moments", "gradients"), "zero3": tuple(held)}
    for part in shared.get(recipe.parallel.how, ()):
        held[part] //= world.size
    return sum(held.values()) + sum(b.numel() * b.element_size() for b in model.buffers())


def free_memory(device: torch.device) -> int:
    """Bytes that a process can still have."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return psutil.virtual_memory().available


def check_room(model: nn.Module, recipe: Recipe, world: World) -> None:
    """Refuse a model whose training cannot fit, whatever the batch."""
    needed, free = bytes_needed(model, recipe, world), free_memory(world.device)
    if world.device.type == "cpu":
        free //= max(1, int(os.environ.get("LOCAL_WORLD_SIZE", world.size)))  # those on this machine share it
    if needed > free:
        where = "the GPU" if world.device.type == "cuda" else "this machine"
        more = "a larger GPU, or more of them with parallel.how=zero3" if world.device.type == "cuda" else "a GPU"
        million = sum(p.numel() for p in model.parameters()) / 1e6
        raise RecipeError(
            f"model: {million:,.0f} M parameters take {needed / 1e9:.1f} GB for weights, gradients and "
            f"{recipe.optimizer.name}'s moments alone, and {where} has {free / 1e9:.1f} GB free. Make the model "
            f"smaller (width, layers), or use {more}."
        )
