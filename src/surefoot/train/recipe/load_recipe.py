"""From a recipe file or shipped name, plus `key=value` overrides, to the recipes to run; and back to plain data."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from surefoot.train.recipe.errors import KeyPath, RecipeError, RecipeOrigin, format_value, nearest, shortened
from surefoot.train.recipe.key_aliases import moved_paths, renamed_path, upgrade
from surefoot.train.recipe.keys import keys
from surefoot.train.recipe.parse import parse_scalar, parse_yaml, read_file
from surefoot.train.recipe.schema import Recipe
from surefoot.train.recipe.shipped import shipped
from surefoot.train.recipe.sweep import folder_name, sweep
from surefoot.train.recipe.validate_recipe import validate

_EXCLUSIVE = {"steps": "epochs", "epochs": "steps"}


def load(source: str, overrides: Sequence[str] = ()) -> list[Recipe]:
    """The recipes of a file or shipped name: more than one when a list of values sweeps a key.

    Raises RecipeError with one message for all problems.
    """
    path = find_recipe(source)
    plain, origin = read_file(path)
    plain, moved = upgrade(plain)
    origin = RecipeOrigin(source if source in shipped() else origin.source, moved_paths(origin.lines, moved))
    if plain.get("name") is None:
        plain["name"] = path.stem
    plain, origin = override(plain, overrides, origin)
    recipes = []
    for variant in sweep(plain, origin):
        name = f"{origin.source} ({variant.get('name')})" if recipes else origin.source
        recipes.append(_with_run_dir(validate(variant, RecipeOrigin(name, origin.lines, origin.overrides))))
    return recipes


def find_recipe(source: str) -> Path:
    """The file of a recipe, from its path or the name of a shipped one."""
    exists = os.path.exists(source)  # False, not an error, for what cannot be a path at all
    if "=" in source and not exists:
        raise RecipeError(f"{source} sets a key; name the recipe first, as in: lm-tiny {source}")
    if (known := shipped()).get(source):
        return known[source]
    path = Path(source)
    if exists:
        return path
    source = shortened(source)
    if path.suffix or os.sep in source:
        raise RecipeError(f"{source}: there is no such file.{_similar_file(path)}")
    near = nearest(source, known)
    hint = f"Did you mean {near}?" if near else "Name a file, or one of those."
    raise RecipeError(f"{source}: no file and no shipped recipe has this name; shipped are {', '.join(known)}. {hint}")


def _similar_file(path: Path) -> str:
    try:
        names = [file.name for file in path.parent.iterdir() if file.suffix in (".yaml", ".yml", ".json")]
    except OSError:
        return f" There is no folder {path.parent}."
    near = nearest(path.name, names)
    return f" Did you mean {path.with_name(near)}?" if near else " List the shipped ones with: surefoot recipes"


def _with_run_dir(recipe: Recipe) -> Recipe:
    return recipe if recipe.run_dir else recipe.model_copy(update={"run_dir": f"runs/{folder_name(recipe.name)}"})


# Overrides


def override(
    plain: Mapping[str, Any], overrides: Sequence[str], origin: RecipeOrigin
) -> tuple[dict[str, Any], RecipeOrigin]:
    """The recipe with `key=value` overrides applied, and where each value comes from; the last of a key wins."""
    changed = copy.deepcopy(dict(plain))
    parsed = [_parse_override(text) for text in overrides]
    paths = {path for path, _, _ in parsed}
    for path, value, text in parsed:
        _set(changed, path, value, text)
        other = _EXCLUSIVE.get(path[0])
        if other and (other,) not in paths and changed[path[0]] is not None:
            changed.pop(other, None)  # an override of epochs replaces the file's steps
    changed, _ = upgrade(changed)  # a whole section may be set to a mapping with old keys
    lines = {path: line for path, line in origin.lines.items() if not any(path[: len(by)] == by for by in paths)}
    return changed, RecipeOrigin(origin.source, lines, {path: text for path, _, text in parsed})


def _parse_override(override: str) -> tuple[KeyPath, Any, str]:
    name, equals, text = override.partition("=")
    path = tuple(part.strip() for part in name.split("."))
    if not equals or not all(path):
        raise RecipeError(f"{shortened(override)}: expected key=value, such as optimizer.lr=3e-4 or steps=1000.")
    if not text.strip():
        raise RecipeError(
            f"{shortened(override)}: there is no value after the =. Write {name}=null for none, {name}='\"\"' for "
            "empty text."
        )
    value = _parse_value(text.strip(), override)
    return renamed_path(path, value), value, override


def _parse_value(text: str, override: str) -> Any:
    try:
        return parse_yaml(text)[0] if text[0] in "[{\"'" else parse_scalar(text)
    except (yaml.YAMLError, RecursionError):
        hint = "Close every bracket and quote, and quote the whole for the shell: 'optimizer.lr=[1e-3, 3e-4]'."
        raise RecipeError(f"{shortened(override)}: the value cannot be read. {hint}") from None


def _set(plain: dict[str, Any], path: KeyPath, value: Any, override: str) -> None:
    inner = plain
    for depth, name in enumerate(path[:-1], 1):
        below: Any = inner.get(name)
        if isinstance(below, str) and (key := keys().get(path[:depth])) and key.has_free_keys:
            below = {"factory": below}  # the short form in the file
        if below is None:
            below = {}
        if not isinstance(below, dict):
            above = ".".join(path[:depth])
            raise RecipeError(
                f"{shortened(override)}: {above} is {format_value(below)}, which has no keys. Set {above} itself."
            )
        inner[name] = below
        inner = below
    inner[path[-1]] = value


# Back to plain data


def as_plain(recipe: Recipe) -> dict[str, Any]:
    """The whole resolved recipe with defaults, as JSON values; written to a file it is a recipe again."""
    return recipe.model_dump(mode="json")


def differences(old: Mapping[str, Any], new: Recipe) -> list[tuple[str, Any, Any]]:
    """Keys whose values differ, with the old and new value; None where a key is absent.

    A key that a later version of surefoot added is no difference while it has its default.
    """
    before, after = dict(_flatten(upgrade(old)[0], "")), dict(_flatten(as_plain(new), ""))
    for name, default in _defaults():
        if name in after:
            before.setdefault(name, default)
    names = [*after, *(name for name in before if name not in after)]
    pairs = ((name, before.get(name), after.get(name)) for name in names)
    return [(name, was, now) for name, was, now in pairs if was != now]


def _defaults() -> Iterator[tuple[str, Any]]:
    for key in keys().values():
        if not key.required:
            default = list(key.default) if isinstance(key.default, tuple) else key.default
            yield from _flatten(default, key.name)


def _flatten(value: Any, above: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flatten(inner, f"{above}.{name}" if above else str(name))
    else:
        yield above, value
