"""A recipe as plain data for the record, and how a run's record differs from the recipe it goes on with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from surefoot.train.recipe.keys import keys
from surefoot.train.recipe.schema import Recipe


def as_plain(recipe: Recipe) -> dict[str, Any]:
    """The whole resolved recipe, defaults too, as JSON has it; as a file it is a recipe again."""
    return recipe.model_dump(mode="json")


def differences(old: Mapping[str, Any], new: Recipe) -> list[tuple[str, Any, Any]]:
    """Keys whose value is another than it was, with both; a key that one of the two lacks is None there.

    A key that came with a later version of surefoot and has its default is no difference.
    """
    before, after = dict(_flat(old, "")), dict(_flat(as_plain(new), ""))
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
            yield from _flat(default, key.name)


def _flat(value: Any, above: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _flat(inner, f"{above}.{name}" if above else str(name))
    else:
        yield above, value
