"""The figures of surefoot.Policy in a recipe: names and values checked before anything is built."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

from pydantic import TypeAdapter, ValidationError

from surefoot.journal.aliases import upgraded_policy
from surefoot.judge.policy import Policy
from surefoot.judge.thresholds import Thresholds
from surefoot.train.recipe.mistakes import Mistake, Place
from surefoot.train.recipe.nearest import nearest
from surefoot.train.recipe.schema import Recipe

_PLACE = ("protection", "figures")
_ELSEWHERE = {
    "observe": "protection.policy",
    "save_every": "checkpoints.every",
    "save_seconds": "checkpoints.seconds",
    "cautious_after_crash": "checkpoints.careful",
}
"""Figures that have a key of their own."""


def policy_of(recipe: Recipe) -> Policy:
    """The policy that a recipe asks for, figures and intervals together."""
    own = {
        "observe": recipe.protection.policy == "observe",
        "save_every": recipe.checkpoints.every,
        "save_seconds": recipe.checkpoints.seconds,
        "cautious_after_crash": recipe.checkpoints.careful,
    }
    return TypeAdapter(Policy).validate_python(own | upgraded_policy(recipe.protection.figures))


def wrong_figures(recipe: Recipe) -> list[Mistake]:
    """Figures that do not exist or stand elsewhere; or else those whose values cannot be."""
    given = upgraded_policy(recipe.protection.figures)
    return [*_misnamed(given)] or [*_impossible(recipe)]


def _misnamed(given: Mapping[str, Any]) -> Iterator[Mistake]:
    for name in given:
        if name in _ELSEWHERE:
            yield Mistake((*_PLACE, name), f"set {_ELSEWHERE[name]} instead")
        else:
            yield from _unknown((name,), Policy)
    if isinstance(sight := given.get("thresholds"), dict):
        for name in sight:
            yield from _unknown(("thresholds", name), Thresholds)


def _unknown(at: Place, kind: type[Policy | Thresholds]) -> Iterator[Mistake]:
    known = [each.name for each in fields(kind) if each.name not in _ELSEWHERE]
    if at[-1] not in known:
        near = nearest(at[-1], known)
        hint = f"Did you mean {near}?" if near else f"There are {', '.join(known)}."
        yield Mistake((*_PLACE, *at), f"surefoot.{kind.__name__} has no such figure. {hint}")


def _impossible(recipe: Recipe) -> Iterator[Mistake]:
    try:
        policy_of(recipe)
    except ValidationError as wrong:
        for error in wrong.errors(include_url=False, include_context=False):
            what = error["msg"].removeprefix("Value error, ").replace("Input should be", "expected", 1).rstrip(".")
            yield Mistake((*_PLACE, *map(str, error["loc"])), what)
