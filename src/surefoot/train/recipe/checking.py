"""Plain data to a `Recipe`: every mistake is found before the first is told."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from surefoot.train.recipe.crossing import crossed
from surefoot.train.recipe.keys import FACTORY, Key, keys, owner, sections
from surefoot.train.recipe.mistakes import Mistake, Origin, Place, RecipeError, refuse, shown
from surefoot.train.recipe.nearest import meant, nearest
from surefoot.train.recipe.schema import Recipe

_ALL = "Every key: surefoot recipes --keys"


def check(plain: Mapping[str, Any], origin: Origin) -> Recipe:
    """The recipe, or a RecipeError that tells all that is wrong with it."""
    plain = {name: {} if value is None and name in sections() else value for name, value in plain.items()}
    mistakes = [*_unknown(plain), *_not_numbers(plain)]
    recipe = None
    try:
        recipe = Recipe.model_validate(plain)
    except ValidationError as wrong:
        mistakes += _told(wrong, plain, {mistake.place for mistake in mistakes})
    if recipe and not mistakes:
        mistakes += crossed(recipe)
    refuse(origin, mistakes)
    assert recipe is not None
    return recipe


def check_arguments(where: str, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that a factory does not take, with the nearest it does, and name those that are missing."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return  # some things of C tell nothing about themselves
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = [] if anything else [name for name in arguments if name not in named]
    missing = [name for name, p in named.items() if p.default is p.empty and name not in arguments]
    called = getattr(function, "__name__", type(function).__name__)
    told = [f"there is no argument {name}{_hint(nearest(name, named))}" for name in unknown]
    if missing:
        told.append(f"{', '.join(missing)} must be given")
    if told:
        takes = ", ".join(named) or "no arguments"
        raise RecipeError(f"{where}: {'; '.join(told)}. {called} takes {takes}.")


def _hint(near: str | None) -> str:
    return f" (did you mean {near}?)" if near else ""


def _unknown(plain: Mapping[str, Any]) -> list[Mistake]:
    """Keys that do not exist, each with the one that was meant."""
    places: list[Place] = []
    for name, value in plain.items():
        if name not in sections():
            places.append((name,))
        elif isinstance(value, dict):
            places += [(name, inner) for inner in value]
    known = [key.name for key in keys().values()]
    return [Mistake(place, _no_such(place, known)) for place in places if not owner(place)]


def _no_such(place: Place, known: list[str]) -> str:
    near = meant(".".join(place), [*known, *sections()])
    return f"there is no such key. {f'Did you mean {near}?' if near else _ALL}"


def _not_numbers(plain: Mapping[str, Any]) -> list[Mistake]:
    """`lr: true` would pass for 1."""
    found = []
    for place, key in keys().items():
        value = _at(plain, place)
        if isinstance(value, bool) and not key.takes_bool:
            found.append(_expected(key, value))
    return found


def _told(wrong: ValidationError, plain: Mapping[str, Any], already: set[Place]) -> list[Mistake]:
    """One mistake for each key, in our words rather than the library's."""
    found: dict[Place, Mistake] = {}
    for error in wrong.errors(include_url=False, include_context=False):
        place = tuple(str(each) for each in error["loc"])
        if error["type"] != "extra_forbidden":
            mistake = _one(error["type"], error["msg"], place, plain)
            found.setdefault(mistake.place, mistake)
    return [mistake for place, mistake in found.items() if place not in already]


def _one(kind: str, message: str, place: Place, plain: Mapping[str, Any]) -> Mistake:
    key = owner(place[:2]) or owner(place[:1])
    if kind == "value_error":  # a section's own word about its keys
        return Mistake(key.place if key else place, message.removeprefix("Value error, "))
    if key is None:
        return Mistake(place[:1], f"expected keys and values below it, got {shown(_at(plain, place[:1]))}")
    if place[-1] == "factory":  # of a mapping that has none, or none that can be
        given = _at(plain, key.place)
        if isinstance(given, str):
            return Mistake(key.place, f"expected {FACTORY}, got {shown(given)}")
        given = given.get("factory")
        return Mistake(
            (*key.place, "factory"), f"expected {FACTORY}, got {'nothing' if given is None else shown(given)}"
        )
    if kind == "missing":
        return Mistake(key.place, f"missing; expected {key.kind}")
    return _expected(key, _at(plain, key.place))


def _expected(key: Key, value: Any) -> Mistake:
    return Mistake(key.place, f"expected {key.kind}, got {shown(value)}")


def _at(plain: Any, place: Place) -> Any:
    for name in place:
        plain = plain.get(name) if isinstance(plain, dict) else None
    return plain
