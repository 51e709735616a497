"""Recipes: one YAML or JSON file that describes a run; read, overridden, swept and validated."""

from surefoot.train.recipe.errors import RecipeError
from surefoot.train.recipe.load_recipe import as_plain, differences, load
from surefoot.train.recipe.schema import Recipe
from surefoot.train.recipe.shipped import shipped
from surefoot.train.recipe.validate_recipe import check_arguments, policy_of, remarks

__all__ = [
    "Recipe",
    "RecipeError",
    "as_plain",
    "check_arguments",
    "differences",
    "load",
    "policy_of",
    "remarks",
    "shipped",
]
