"""What a recipe names as `module:name`, found and called; whatever is wrong with it is told in one message."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from surefoot.train.exits import out_of_memory
from surefoot.train.recipe.checking import check_arguments
from surefoot.train.recipe.mistakes import RecipeError
from surefoot.train.recipe.nearest import nearest
from surefoot.train.recipe.schema import Made


def find(where: str, name: str) -> Callable[..., Any]:
    """The function or class of this name; modules beside the working directory are found too."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise RecipeError(f"{where}: expected package.module:name, got {name!r}")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module and not module.startswith(f"{error.name}."):
            raise RecipeError(f"{where}: {module} needs {error.name}, which is not installed") from error
        raise RecipeError(
            f"{where}: there is no module {error.name!r}. Is its folder the working directory, or installed?"
        ) from error
    except Exception as error:
        raise RecipeError(f"{where}: {module} cannot be imported: {type(error).__name__}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = nearest(part, [each for each in dir(found) if not each.startswith("_")])
            raise RecipeError(f"{where}: {module} has no {part!r}" + (f". Did you mean {near!r}?" if near else ""))
        found = getattr(found, part)
    if not callable(found):
        raise RecipeError(f"{where}: {name} is no function and no class, but a {type(found).__name__}")
    return found


def make(where: str, made: Made) -> Any:
    """Call it with the other keys of its section."""
    factory = find(f"{where}.factory", made.factory)
    check_arguments(where, factory, made.arguments)
    try:
        return factory(**made.arguments)
    except Exception as error:
        if out_of_memory(error):
            raise
        raise RecipeError(f"{where}: {made.factory} cannot make it: {_told(error)}") from error


def takes_two(function: object) -> bool:
    """Whether it can be called with two things; True where that cannot be known."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:
        return True  # some things of C tell nothing about themselves
    return True


def _told(error: Exception) -> str:
    """What is wrong; an error that was not raised to be read also with its kind and its place."""
    said = str(error)
    if type(error) in (RecipeError, ValueError) and said:
        return said
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {said or 'no words'} ({place.filename}, line {place.lineno})"
