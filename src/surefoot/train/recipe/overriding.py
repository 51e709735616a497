"""Keys set on the command line: `optimizer.lr=3e-4`, each value read as it would be in the file."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from surefoot.train.recipe.keys import keys
from surefoot.train.recipe.mistakes import Origin, Place, RecipeError, shortened, shown
from surefoot.train.recipe.yamltext import parse, scalar

_LENGTHS = {"steps": "epochs", "epochs": "steps"}


def override(plain: Mapping[str, Any], told: Sequence[str], origin: Origin) -> tuple[dict[str, Any], Origin]:
    """The recipe with the keys of the command line set, and who set what; of two for one key the last counts."""
    changed = copy.deepcopy(dict(plain))
    said = [_split(each) for each in told]
    named = {place for place, _, _ in said}
    for place, text, each in said:
        _put(changed, place, _value(text, each), each)
        other = _LENGTHS.get(place[0])
        if other and (other,) not in named and changed[place[0]] is not None:
            changed.pop(other, None)  # who asks for epochs means: instead of the file's steps
    lines = {place: line for place, line in origin.lines.items() if not any(place[: len(by)] == by for by in named)}
    return changed, Origin(origin.source, lines, {place: each for place, _, each in said})


def _split(told: str) -> tuple[Place, str, str]:
    name, equals, text = told.partition("=")
    place = tuple(part.strip() for part in name.split("."))
    if not equals or not all(place):
        raise RecipeError(f"{shortened(told)}: expected key=value, such as optimizer.lr=3e-4 or steps=1000.")
    if not text.strip():
        raise RecipeError(
            f"{shortened(told)}: nothing stands after the =. Write {name}=null for none, {name}='\"\"' for no text."
        )
    return place, text.strip(), told


def _value(text: str, told: str) -> Any:
    try:
        return parse(text)[0] if text[0] in "[{\"'" else scalar(text)
    except (yaml.YAMLError, RecursionError):
        hint = "Close every bracket and quote, and put the whole in quotes for the shell: 'optimizer.lr=[1e-3, 3e-4]'."
        raise RecipeError(f"{shortened(told)}: the value cannot be read. {hint}") from None


def _put(plain: dict[str, Any], place: Place, value: Any, told: str) -> None:
    inner = plain
    for depth, name in enumerate(place[:-1], 1):
        below: Any = inner.get(name)
        if isinstance(below, str) and (key := keys().get(place[:depth])) and key.free:
            below = {"factory": below}  # written short in the file
        if below is None:
            below = {}
        if not isinstance(below, dict):
            above = ".".join(place[:depth])
            raise RecipeError(f"{shortened(told)}: {above} is {shown(below)}, which has no keys. Set {above} itself.")
        inner[name] = below
        inner = below
    inner[place[-1]] = value
