"""From a file or a name, and what the command line adds, to the recipes to run."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from surefoot.train.recipe.checking import check
from surefoot.train.recipe.mistakes import Origin, RecipeError, shortened
from surefoot.train.recipe.nearest import nearest
from surefoot.train.recipe.overriding import override
from surefoot.train.recipe.reading import read
from surefoot.train.recipe.schema import Recipe
from surefoot.train.recipe.shipped import shipped
from surefoot.train.recipe.sweeping import folder_name, sweep


def load(source: str, overrides: Sequence[str] = ()) -> list[Recipe]:
    """The recipes that a file, or the name of a shipped one, stands for: more than one when a list sweeps.

    Raises RecipeError with one message for all that is wrong.
    """
    path = find(source)
    plain, origin = read(path)
    if source in shipped():
        origin = Origin(source, origin.lines)
    if plain.get("name") is None:
        plain["name"] = path.stem
    plain, origin = override(plain, overrides, origin)
    made = sweep(plain, origin)
    recipes = []
    for each in made:
        named = f"{origin.source} ({each.get('name')})" if recipes else origin.source
        recipes.append(_placed(check(each, Origin(named, origin.lines, origin.told))))
    return recipes


def find(source: str) -> Path:
    """The file of a recipe, by its path or by the name of a shipped one."""
    exists = os.path.exists(source)  # False, not an error, for what cannot be a path at all
    if "=" in source and not exists:
        raise RecipeError(f"{source} sets a key; the recipe comes first, as in: lm-tiny {source}")
    if (known := shipped()).get(source):
        return known[source]
    path = Path(source)
    if exists:
        return path
    source = shortened(source)
    if path.suffix or os.sep in source:
        raise RecipeError(f"{source}: there is no such file.{_file_near(path)}")
    near = nearest(source, known)
    hint = f"Did you mean {near}?" if near else "Name a file, or one of those."
    raise RecipeError(f"{source}: no file and no shipped recipe is called so; there are {', '.join(known)}. {hint}")


def _file_near(path: Path) -> str:
    try:
        names = [each.name for each in path.parent.iterdir() if each.suffix in (".yaml", ".yml", ".json")]
    except OSError:
        return f" There is no folder {path.parent}."
    near = nearest(path.name, names)
    return f" Did you mean {path.with_name(near)}?" if near else " Shipped ones are listed by: surefoot recipes"


def _placed(recipe: Recipe) -> Recipe:
    return recipe if recipe.run_dir else recipe.model_copy(update={"run_dir": f"runs/{folder_name(recipe.name)}"})
