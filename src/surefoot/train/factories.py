"""Finds and calls what a recipe names as `module:name`; every problem becomes one RecipeError."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

from surefoot.train.exit_codes import is_out_of_memory
from surefoot.train.recipe.errors import RecipeError, nearest
from surefoot.train.recipe.schema import Factory
from surefoot.train.recipe.validate_recipe import check_arguments


def find_factory(key: str, name: str) -> Callable[..., Any]:
    """The function or class `name`; modules in the working directory are found too."""
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise RecipeError(f"{key}: expected package.module:name, got {name!r}")
    working_dir = os.getcwd()
    if working_dir not in sys.path:
        sys.path.insert(0, working_dir)
    try:
        value: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module and not module.startswith(f"{error.name}."):
            raise RecipeError(f"{key}: {module} needs {error.name}, which is not installed") from error
        raise RecipeError(
            f"{key}: there is no module {error.name!r}. Install it, or run the command in the folder that holds it"
        ) from error
    except Exception as error:
        raise RecipeError(f"{key}: {module} cannot be imported: {type(error).__name__}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            near = nearest(part, [public for public in dir(value) if not public.startswith("_")])
            raise RecipeError(f"{key}: {module} has no {part!r}" + (f". Did you mean {near!r}?" if near else ""))
        value = getattr(value, part)
    if not callable(value):
        raise RecipeError(f"{key}: {name} is a {type(value).__name__}, not a function or class")
    return value


def call_factory(section: str, factory: Factory) -> Any:
    """Call the factory with the other keys of its section as arguments."""
    function = find_factory(f"{section}.factory", factory.factory)
    check_arguments(section, function, factory.arguments)
    try:
        return function(**factory.arguments)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise RecipeError(f"{section}: {factory.factory} failed: {_describe(error)}") from error


def accepts_two_arguments(function: object) -> bool:
    """Whether it can be called with two positional arguments; True where that cannot be known."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(None, None)
    except TypeError:
        return False
    except ValueError:
        return True  # some C functions have no signature
    return True


def _describe(error: Exception) -> str:
    """The message; for errors that were not raised to be read also type, file and line."""
    message = str(error)
    if type(error) in (RecipeError, ValueError) and message:
        return message
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {message or 'no message'} ({frame.filename}, line {frame.lineno})"
