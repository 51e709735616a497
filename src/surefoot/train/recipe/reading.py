"""A recipe's file as plain data: YAML or JSON, refused with the line and column where it cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import yaml

from surefoot.train.recipe.mistakes import Origin, RecipeError
from surefoot.train.recipe.yamltext import parse

_LARGEST = 1 << 20
"""Bytes of a recipe; more is something else."""
_MOST_VALUES, _DEEPEST = 20_000, 12
_COPY = "Begin with one that works: surefoot recipes lm-tiny --to mine.yaml"


def read(path: Path) -> tuple[dict[str, Any], Origin]:
    """The keys and values of a file, and where each stands."""
    text = _text(path)
    if not text.strip():
        raise RecipeError(f"{path} is empty. {_COPY}")
    try:
        value, lines = _json(text, path) if path.suffix.lower() == ".json" else parse(text)
    except yaml.YAMLError as wrong:
        _not_yaml(path, wrong)
    except RecursionError:
        raise RecipeError(f"{path} is nested too deep for a recipe. {_COPY}") from None
    except RecipeError:
        raise
    except ValueError as wrong:
        raise RecipeError(f"{path}: {wrong}. Correct it there.") from None
    if value is None:
        raise RecipeError(f"{path} holds comments only, and no key. {_COPY}")
    if not isinstance(value, dict):
        what = "a list" if isinstance(value, list) else "a single value"
        raise RecipeError(f"{path} holds {what}; a recipe is keys and values, such as `steps: 1000`. {_COPY}")
    return settled(value, str(path)), Origin(str(path), lines)


def _text(path: Path) -> str:
    if path.is_dir():
        raise RecipeError(f"{path} is a folder; name the recipe's file in it.")
    try:
        with path.open("rb") as file:
            raw = file.read(_LARGEST + 1)
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror or error}.") from None
    if len(raw) > _LARGEST:
        raise RecipeError(f"{path} is larger than a recipe can be (1 MiB). Is it the data rather than the recipe?")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise RecipeError(f"{path}, line {line}: not text in UTF-8. Save it as UTF-8 in your editor.") from None


def _not_yaml(path: Path, wrong: yaml.YAMLError) -> NoReturn:
    mark = getattr(wrong, "problem_mark", None)
    where = f"{path}, line {mark.line + 1}, column {mark.column + 1}" if mark else str(path)
    what = getattr(wrong, "problem", None) or getattr(wrong, "reason", None) or "cannot be read"
    if "could not determine a constructor" in what:
        what = "a tag (!...) asks for something other than plain data; take it out"
    elif "'\\t'" in what:
        what = "a tab stands where spaces must; indent with spaces"
    elif "expected a single document" in (getattr(wrong, "context", None) or ""):
        what = "a second document begins (---); a recipe is one"
    elif "stands here again" not in what:
        what = f"not YAML: {what}. Look for a missing colon, quote or bracket here or just above"
    raise RecipeError(f"{where}: {what}.") from None


def _json(text: str, path: Path) -> tuple[Any, dict[Any, int]]:
    try:
        value = json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)
    except json.JSONDecodeError as wrong:
        where = f"{path}, line {wrong.lineno}, column {wrong.colno}"
        raise RecipeError(f"{where}: not JSON: {wrong.msg}. Look for a missing comma, quote or bracket.") from None
    try:
        return value, parse(text)[1]  # most JSON is YAML too, which knows the lines
    except yaml.YAMLError:
        return value, {}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice} stands twice among {', '.join(made)}; keep one of the two")
    return made


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number that a recipe can hold")


def settled(value: dict[str, Any], where: str) -> dict[str, Any]:
    """A copy made of text, numbers, lists and text-keyed mappings only; nothing is shared or endless in it."""
    count = 0

    def copy(value: Any, above: str, depth: int) -> Any:
        nonlocal count
        count += 1
        if depth > _DEEPEST or count > _MOST_VALUES:
            raise RecipeError(f"{where}: {above} is nested too deep, or far too long, for a recipe. Shorten it.")
        if isinstance(value, list):
            return [copy(each, above, depth + 1) for each in value]
        if not isinstance(value, dict):
            return value
        for key in value:
            if not isinstance(key, str):
                raise RecipeError(f"{where}: the key {key!r} {f'in {above} ' if above else ''}must be text; quote it.")
        return {key: copy(each, f"{above}.{key}".lstrip("."), depth + 1) for key, each in value.items()}

    return copy(value, "", 0)
