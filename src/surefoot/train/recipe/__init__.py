"""One file for everything a run is made of: read, checked, overridden, swept."""

from surefoot.train.recipe.checking import check_arguments
from surefoot.train.recipe.crossing import remarks
from surefoot.train.recipe.dumping import as_plain, differences
from surefoot.train.recipe.figures import policy_of
from surefoot.train.recipe.loading import load
from surefoot.train.recipe.mistakes import RecipeError
from surefoot.train.recipe.schema import Recipe
from surefoot.train.recipe.shipped import shipped

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
