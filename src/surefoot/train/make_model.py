"""Makes the recipe's model; a model that cannot be built or trained is refused before any data is read."""

from __future__ import annotations

import os

import torch
from torch import nn

from surefoot.parallel import World
from surefoot.train.factories import call_factory, find_factory
from surefoot.train.recipe.errors import RecipeError
from surefoot.train.recipe.schema import Recipe
from surefoot.train.recipe.validate_recipe import check_arguments

_MOMENTS_PER_WEIGHT = {"sgd": 1, "lars": 1, "adagrad": 1, "rmsprop": 1}
"""Values an optimizer keeps for each weight; all others keep two."""


def check_model(recipe: Recipe, world: World) -> None:
    """Refuse a model that cannot be made or does not fit into memory; it is built on the meta device, so cheaply."""
    check_arguments("model", find_factory("model.factory", recipe.model.factory), recipe.model.arguments)
    try:
        with torch.device("meta"):
            model = call_factory("model", recipe.model)
    except Exception:
        return  # some factories read tensor values, which meta tensors lack; `make_model` calls them for real
    check_memory(_checked(model, recipe), recipe, world)


def make_model(recipe: Recipe) -> nn.Module:
    """The model with its initial weights, in host memory."""
    model = _checked(call_factory("model", recipe.model), recipe)
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise RecipeError(
            f"model.factory: {recipe.model.factory} made a model on the meta device, without values. Does it keep "
            "tensors from one call to the next? It is called twice, first to find out how large the model is."
        )
    return model


def bytes_needed(model: nn.Module, recipe: Recipe, world: World) -> int:
    """Bytes for weights, gradients and moments on one rank; activations come on top."""
    weights = sum(4 * p.numel() for p in model.parameters())
    trained = sum(4 * p.numel() for p in model.parameters() if p.requires_grad)
    needed = {"weights": weights, "gradients": trained}
    needed["moments"] = trained * _MOMENTS_PER_WEIGHT.get(recipe.optimizer.name.lower(), 2)
    sharded = {"zero1": ("moments",), "zero2": ("moments", "gradients"), "zero3": tuple(needed)}
    for part in sharded.get(recipe.parallel.strategy, ()):
        needed[part] //= world.size
    return sum(needed.values()) + sum(b.numel() * b.element_size() for b in model.buffers())


def free_memory(device: torch.device) -> int:
    """Bytes this process can still allocate."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return psutil.virtual_memory().available


def check_memory(model: nn.Module, recipe: Recipe, world: World) -> None:
    """Refuse a model whose training cannot fit into memory, whatever the batch size."""
    needed, free = bytes_needed(model, recipe, world), free_memory(world.device)
    if world.device.type == "cpu":
        free //= max(1, int(os.environ.get("LOCAL_WORLD_SIZE", world.size)))  # the ranks of one host share it
    if needed > free:
        on_gpu = world.device.type == "cuda"
        where = "the GPU" if on_gpu else "this machine"
        instead = "a larger GPU, or more of them with parallel.strategy=zero3" if on_gpu else "a GPU"
        millions = sum(p.numel() for p in model.parameters()) / 1e6
        raise RecipeError(
            f"model: {millions:,.0f} M parameters take {needed / 1e9:.1f} GB for weights, gradients and "
            f"{recipe.optimizer.name}'s moments alone, and {where} has {free / 1e9:.1f} GB free. Make the model "
            f"smaller (width, layers), or use {instead}."
        )


def _checked(model: object, recipe: Recipe) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise RecipeError(
            f"model.factory: {recipe.model.factory} returned a {type(model).__name__}, not a torch.nn.Module"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise RecipeError(f"model.factory: {recipe.model.factory} made a model without trainable parameters")
    return model
