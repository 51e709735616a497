"""A list where one value belongs: a grid of recipes, each with a name and a folder of its own."""

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

from surefoot.train.recipe.keys import keys, owner
from surefoot.train.recipe.mistakes import Mistake, Origin, Place, refuse, shown

MOST = 1000
"""Runs that one recipe may sweep."""
_LONGEST = 120
"""Characters of a folder's name; systems allow 255 bytes."""


def sweep(plain: Mapping[str, Any], origin: Origin) -> list[dict[str, Any]]:
    """All recipes that a recipe with lists stands for, each named; itself when it has none."""
    swept = dict(_lists(plain, ()))
    refuse(origin, [mistake for place, values in swept.items() for mistake in _wrong(place, values)])
    if (count := math.prod(len(values) for values in swept.values())) > MOST:
        place = max(swept, key=lambda each: len(swept[each]))
        refuse(origin, [Mistake(place, f"the lists make {count} runs, of {MOST} at most; sweep less at once")])
    words = {place: _word(place, swept) for place in swept}
    made = [_one(plain, dict(zip(swept, values, strict=True)), words) for values in itertools.product(*swept.values())]
    return _apart(made) if swept else made


def folder_name(text: str) -> str:
    """A name that is safe for a folder anywhere, and readable."""
    safe = re.sub(r"[^\w.=+-]+", "-", text, flags=re.ASCII).strip("-. ") or "run"
    if len(safe) <= _LONGEST:
        return safe
    return f"{safe[: _LONGEST - 9]}-{hashlib.sha256(text.encode('utf-8', 'backslashreplace')).hexdigest()[:8]}"


def _lists(value: Any, place: Place) -> Iterator[tuple[Place, list[Any]]]:
    """Places that hold a list of values rather than one value."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _lists(inner, (*place, name))
    elif isinstance(value, list) and (key := owner(place)):
        takes_list = key.takes_list and key.place == place
        if not takes_list or (value and all(isinstance(each, list) for each in value)):
            yield place, value


def _wrong(place: Place, values: list[Any]) -> Iterator[Mistake]:
    if not values:
        yield Mistake(place, "an empty list; name a value, or several to try each in a run of its own")
    for number, value in enumerate(values):
        if value in values[:number]:
            yield Mistake(place, f"{shown(value)} stands twice in the list; each value makes a run of its own")
            return


def _word(place: Place, swept: Mapping[Place, Any]) -> str:
    """The key in a run's name: its last part where that says enough."""
    lasts = Counter(each[-1] for each in {*keys(), *swept})
    return place[-1] if lasts[place[-1]] == 1 else ".".join(place)


def _one(plain: Mapping[str, Any], chosen: Mapping[Place, Any], words: Mapping[Place, str]) -> dict[str, Any]:
    made = copy.deepcopy(dict(plain))
    for place, value in chosen.items():
        inner = made
        for name in place[:-1]:
            inner = inner[name]
        inner[place[-1]] = copy.deepcopy(value)
    name = made.get("name", "run")
    parts = [
        f"{words[place]}={_text(value)}" for place, value in chosen.items() if place not in (("name",), ("run_dir",))
    ]
    if not isinstance(name, str | int | float) or isinstance(name, bool) or not parts:
        return made
    made["name"] = folder_name("-".join((str(name), *parts)))
    if isinstance(made.get("run_dir"), str):
        made["run_dir"] = f"{made['run_dir'].rstrip('/')}-{folder_name('-'.join(parts))}"
    return made


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "+".join(map(_text, value))
    return value if isinstance(value, str) else json.dumps(value)


def _apart(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Names and folders that came out the same, also where upper and lower case are one, get a number."""
    for key in ("name", "run_dir"):
        seen: set[str] = set()
        for each in made:
            if isinstance(text := each.get(key), str):
                each[key] = next(one for one in _numbered(text) if one.lower() not in seen)
                seen.add(each[key].lower())
    return made


def _numbered(text: str) -> Iterator[str]:
    yield text
    yield from (f"{text}-{number}" for number in itertools.count(2))
