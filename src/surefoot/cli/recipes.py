"""`surefoot recipes` on the console: which are shipped, one to copy, and every key there is."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.train.recipe import RecipeError, as_plain, load, shipped
from surefoot.train.recipe.keys import Key, keys, sections
from surefoot.train.recipe.nearest import nearest
from surefoot.train.recipe.shipped import summary

FINE, UNUSABLE = 0, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the options asked for."""

    as_json: bool = False
    to: Path | None = None
    keys: bool = False


def show(name: str | None, wishes: Wishes) -> int:
    """Do what was asked for; bad usage ends in one message."""
    try:
        _show(name, wishes)
    except RecipeError as wrong:
        print(f"surefoot recipes: {wrong}", file=sys.stderr)
        return UNUSABLE
    except BrokenPipeError:
        raise  # who reads it has seen enough: the console command ends quietly
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"surefoot recipes: {where}{error.strerror or error}", file=sys.stderr)
        return UNUSABLE
    return FINE


def _show(name: str | None, wishes: Wishes) -> None:
    if wishes.keys:
        if wishes.to:
            raise RecipeError("--keys prints to the console; use > to keep it")
        _show_keys(name, wishes.as_json)
    elif name is None:
        if wishes.to:
            raise RecipeError(f"name the recipe to copy: surefoot recipes lm-tiny --to {wishes.to}")
        _show_list(wishes.as_json)
    else:
        _show_one(name, wishes)


def _show_list(as_json: bool) -> None:
    rows = [{"name": name, "summary": summary(path), "path": str(path)} for name, path in shipped().items()]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    wide = max(len(row["name"]) for row in rows)
    for row in rows:
        print(f"{row['name']:<{wide}}  {row['summary']}")
    print("\nRun one:  surefoot train lm-tiny\nCopy one: surefoot recipes lm-tiny --to mine.yaml")


def _show_one(name: str, wishes: Wishes) -> None:
    path = shipped().get(name)
    if path is None:
        near = nearest(name, shipped())
        hint = f" Did you mean {near}?" if near else ""
        raise RecipeError(f"{name} is not shipped; there are {', '.join(shipped())}.{hint}")
    text = path.read_text(encoding="utf-8")
    if wishes.as_json:
        text = json.dumps(as_plain(load(name)[0]), indent=2) + "\n"
    if wishes.to is None:
        print(text, end="")
    else:
        to = wishes.to / f"{name}.{'json' if wishes.as_json else 'yaml'}" if wishes.to.is_dir() else wishes.to
        _write(to, text)
        print(f"Wrote {to}. Edit it, then: surefoot train {to}")


def _write(to: Path, text: str) -> None:
    try:
        with to.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise RecipeError(f"{to} is there already and was left alone. Name another file, or remove it first.") from None
    except FileNotFoundError:
        raise RecipeError(f"{to}: there is no folder {to.parent}. Make it first: mkdir -p {to.parent}") from None


def _show_keys(name: str | None, as_json: bool) -> None:
    """All keys, or those of one section."""
    known = {key.place[0] for key in keys().values()}
    if name is not None and name not in known:
        near = nearest(name, known)
        raise RecipeError(f"{name} is no section of a recipe.{f' Did you mean {near}?' if near else ''}")
    chosen = [key for key in keys().values() if name in (None, key.place[0])]
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
        if len(key.place) > 1 and key.place[0] != section:
            section = key.place[0]
            yield f"\n{section}: {sections()[section]}"
        default = "must be given" if key.required else f"default {_default(key.default)}"
        yield f"  {key.name}: {key.kind}; {default}"
        if key.description:
            yield f"      {key.description}"


def _default(value: Any) -> str:
    if isinstance(value, dict) and "factory" in value:
        value = value["factory"]
    return value if isinstance(value, str) and value else json.dumps(value)
