"""`surefoot recipes`: lists and copies the shipped recipes, and explains every key."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.train.recipe import RecipeError, as_plain, load, shipped
from surefoot.train.recipe.errors import nearest
from surefoot.train.recipe.keys import Key, keys, sections
from surefoot.train.recipe.shipped import summary

FINE, UNUSABLE = 0, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipesOptions:
    """Options of the command."""

    as_json: bool = False
    to: Path | None = None
    keys: bool = False


def show(name: str | None, options: RecipesOptions) -> int:
    """Run the command; bad usage becomes one message and exit code 2."""
    try:
        _show(name, options)
    except RecipeError as error:
        print(f"surefoot recipes: {error}", file=sys.stderr)
        return UNUSABLE
    except BrokenPipeError:
        raise  # typer exits quietly when the reader of a pipe leaves
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"surefoot recipes: {where}{error.strerror or error}", file=sys.stderr)
        return UNUSABLE
    return FINE


def _show(name: str | None, options: RecipesOptions) -> None:
    if options.keys:
        if options.to:
            raise RecipeError("--keys prints to the console; use > to write it to a file")
        _show_keys(name, options.as_json)
    elif name is None:
        if options.to:
            raise RecipeError(f"name the recipe to copy: surefoot recipes lm-tiny --to {options.to}")
        _show_list(options.as_json)
    else:
        _show_recipe(name, options)


def _show_list(as_json: bool) -> None:
    rows = [{"name": name, "summary": summary(path), "path": str(path)} for name, path in shipped().items()]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        print(f"{row['name']:<{width}}  {row['summary']}")
    print("\nRun one:  surefoot train lm-tiny\nCopy one: surefoot recipes lm-tiny --to mine.yaml")


def _show_recipe(name: str, options: RecipesOptions) -> None:
    path = shipped().get(name)
    if path is None:
        near = nearest(name, shipped())
        hint = f" Did you mean {near}?" if near else ""
        raise RecipeError(f"{name} is not a shipped recipe; there are {', '.join(shipped())}.{hint}")
    text = path.read_text(encoding="utf-8")
    if options.as_json:
        text = json.dumps(as_plain(load(name)[0]), indent=2) + "\n"
    if options.to is None:
        print(text, end="")
    else:
        suffix = "json" if options.as_json else "yaml"
        to = options.to / f"{name}.{suffix}" if options.to.is_dir() else options.to
        _write(to, text)
        print(f"Wrote {to}. Edit it, then: surefoot train {to}")


def _write(to: Path, text: str) -> None:
    try:
        with to.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise RecipeError(f"{to} already exists and was not changed. Name another file, or remove it first.") from None
    except FileNotFoundError:
        raise RecipeError(f"{to}: there is no folder {to.parent}. Create it first: mkdir -p {to.parent}") from None


def _show_keys(name: str | None, as_json: bool) -> None:
    """All keys, or those of one section."""
    known = {key.path[0] for key in keys().values()}
    if name is not None and name not in known:
        near = nearest(name, known)
        raise RecipeError(f"{name} is not a section of a recipe.{f' Did you mean {near}?' if near else ''}")
    chosen = [key for key in keys().values() if name in (None, key.path[0])]
    if as_json:
        print(json.dumps([_as_data(key) for key in chosen], indent=2))
    else:
        print("\n".join(_lines(chosen)))


def _as_data(key: Key) -> dict[str, Any]:
    data: dict[str, Any] = {"key": key.name, "kind": key.kind, "required": key.required}
    return data | {"default": key.default, "description": key.description}


def _lines(chosen: list[Key]) -> Iterator[str]:
    section = ""
    for key in chosen:
        if len(key.path) > 1 and key.path[0] != section:
            section = key.path[0]
            yield f"\n{section}: {sections()[section]}"
        default = "required" if key.required else f"default {_format_default(key.default)}"
        yield f"  {key.name}: {key.kind}; {default}"
        if key.description:
            yield f"      {key.description}"


def _format_default(value: Any) -> str:
    if isinstance(value, dict) and "factory" in value:
        value = value["factory"]
    return value if isinstance(value, str) and value else json.dumps(value)
