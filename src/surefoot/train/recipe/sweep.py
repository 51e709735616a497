"""Sweeps: a list where one value belongs makes a grid of recipes, each with its own name and folder."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from surefoot.train.recipe.errors import KeyPath, RecipeOrigin, RecipeProblem, format_value, raise_problems
from surefoot.train.recipe.keys import keys, owner

MAX_RUNS = 1000
"""Runs of one sweep."""
_MAX_NAME_LENGTH = 120
"""Characters of a folder's name; file systems allow 255 bytes."""


def sweep(plain: Mapping[str, Any], origin: RecipeOrigin) -> list[dict[str, Any]]:
    """All recipes of a sweep, each named; the recipe itself when it has no list to sweep."""
    swept = dict(_swept_lists(plain, ()))
    raise_problems(origin, [problem for path, values in swept.items() for problem in _list_problems(path, values)])
    if (count := math.prod(len(values) for values in swept.values())) > MAX_RUNS:
        longest = max(swept, key=lambda path: len(swept[path]))
        raise_problems(
            origin, [RecipeProblem(longest, f"the lists make {count} runs, of {MAX_RUNS} at most; sweep less at once")]
        )
    labels = {path: _label(path, swept) for path in swept}
    variants = [
        _variant(plain, dict(zip(swept, values, strict=True)), labels) for values in itertools.product(*swept.values())
    ]
    return _with_unique_names(variants) if swept else variants


def folder_name(text: str) -> str:
    """A readable name that is safe for a folder on any system."""
    safe = re.sub(r"[^\w.=+-]+", "-", text, flags=re.ASCII).strip("-. ") or "run"
    if len(safe) <= _MAX_NAME_LENGTH:
        return safe
    return f"{safe[: _MAX_NAME_LENGTH - 9]}-{hashlib.sha256(text.encode('utf-8', 'backslashreplace')).hexdigest()[:8]}"


def _swept_lists(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, list[Any]]]:
    """Keys with a list of values where they take a single one."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _swept_lists(inner, (*path, name))
    elif isinstance(value, list) and (key := owner(path)):
        takes_list = key.takes_list and key.path == path
        if not takes_list or (value and all(isinstance(item, list) for item in value)):
            yield path, value


def _list_problems(path: KeyPath, values: list[Any]) -> Iterator[RecipeProblem]:
    if not values:
        yield RecipeProblem(path, "an empty list; give one value, or several to try each in its own run")
    for number, value in enumerate(values):
        if value in values[:number]:
            yield RecipeProblem(
                path, f"{format_value(value)} occurs twice in the list; each value makes a run of its own"
            )
            return


def _label(path: KeyPath, swept: Mapping[KeyPath, Any]) -> str:
    """The key in a run's name: its last part where that is unambiguous."""
    counts = Counter(other[-1] for other in {*keys(), *swept})
    return path[-1] if counts[path[-1]] == 1 else ".".join(path)


def _variant(plain: Mapping[str, Any], chosen: Mapping[KeyPath, Any], labels: Mapping[KeyPath, str]) -> dict[str, Any]:
    variant = copy.deepcopy(dict(plain))
    for path, value in chosen.items():
        inner = variant
        for name in path[:-1]:
            inner = inner[name]
        inner[path[-1]] = copy.deepcopy(value)
    name = variant.get("name", "run")
    suffixes = [
        f"{labels[path]}={_format(value)}" for path, value in chosen.items() if path not in (("name",), ("run_dir",))
    ]
    if not isinstance(name, str | int | float) or isinstance(name, bool) or not suffixes:
        return variant
    variant["name"] = folder_name("-".join((str(name), *suffixes)))
    if isinstance(variant.get("run_dir"), str):
        variant["run_dir"] = f"{variant['run_dir'].rstrip('/')}-{folder_name('-'.join(suffixes))}"
    return variant


def _format(value: Any) -> str:
    if isinstance(value, list):
        return "+".join(map(_format, value))
    return value if isinstance(value, str) else json.dumps(value)


def _with_unique_names(variants: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Number names and folders that coincide; case is ignored, as on some file systems."""
    for key in ("name", "run_dir"):
        seen: set[str] = set()
        for variant in variants:
            if isinstance(text := variant.get(key), str):
                variant[key] = next(candidate for candidate in _numbered(text) if candidate.lower() not in seen)
                seen.add(variant[key].lower())
    return variants


def _numbered(text: str) -> Iterator[str]:
    yield text
    yield from (f"{text}-{number}" for number in itertools.count(2))
