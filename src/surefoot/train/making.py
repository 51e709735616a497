"""The model of a recipe, made; what is wrong with it is told before any data is read."""

from __future__ import annotations

import torch
from torch import nn

from surefoot.parallel import World
from surefoot.train.factories import find, make
from surefoot.train.recipe.checking import check_arguments
from surefoot.train.recipe.mistakes import RecipeError
from surefoot.train.recipe.schema import Recipe
from surefoot.train.room import check_room


def check_model(recipe: Recipe, world: World) -> None:
    """Refuse a model that cannot be made or has no room, at little cost: it is made without its numbers."""
    check_arguments("model", find("model.factory", recipe.model.factory), recipe.model.arguments)
    try:
        with torch.device("meta"):
            model = make("model", recipe.model)
    except Exception:
        return  # some factories read numbers, which are not there: they are called in earnest later
    check_room(_checked(model, recipe), recipe, world)


def make_model(recipe: Recipe) -> nn.Module:
    """The model, with its first weights, in the memory of this process."""
    model = _checked(make("model", recipe.model), recipe)
    if any(each.is_meta for each in (*model.parameters(), *model.buffers())):
        raise RecipeError(
            f"model.factory: {recipe.model.factory} made a model without numbers (device meta). Does it keep tensors "
            "from one call to the next? It is called twice, at first to see how large the model is."
        )
    return model


def _checked(model: object, recipe: Recipe) -> nn.Module:
    if not isinstance(model, nn.Module):
        made = f"model.factory: {recipe.model.factory} made a {type(model).__name__}"
        raise RecipeError(f"{made}, and no torch.nn.Module")
    if not any(p.requires_grad for p in model.parameters()):
        raise RecipeError(f"model.factory: {recipe.model.factory} made a model with no weight that can be trained")
    return model
