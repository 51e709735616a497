"""What is wrong with a recipe, told all at once: where it stands, what was expected, and the way out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MOST = 5
"""Mistakes that are told at once."""
_LONGEST = 60
"""Characters of a wrong value that are shown."""

Place = tuple[str, ...]
"""A key by the keys above it: ("optimizer", "lr")."""


class RecipeError(ValueError):
    """A recipe that cannot be run as it stands; the message says where, why and what to do."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """One thing that is wrong, at a key of the recipe."""

    place: Place
    what: str


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the values of a recipe come from, so that a mistake can be found."""

    source: str
    lines: dict[Place, int] = field(default_factory=dict)
    """Lines of the keys in the file."""
    told: dict[Place, str] = field(default_factory=dict)
    """What was said on the command line, by the key it sets."""

    def of(self, place: Place) -> str:
        """Where a key was set: its line, what stood on the command line, or nothing; then the key itself."""
        key = ".".join(place)
        if told := self.told.get(place):
            return f"command line, {shortened(told)}"
        if place not in self.lines and (below := [told for by, told in self.told.items() if by[: len(place)] == place]):
            return f"command line, {shortened(below[0])}: {key}"
        for length in range(len(place), 0, -1):
            if told := self.told.get(place[:length]):
                return f"command line, {shortened(told)}: {key}"
            if line := self.lines.get(place[:length]):
                return f"line {line}: {key}"
        return key


def refuse(origin: Origin, mistakes: Sequence[Mistake]) -> None:
    """Raise one error that tells all mistakes; nothing happens when there are none."""
    lines = [f"{origin.of(mistake.place)}: {mistake.what}" for mistake in mistakes[:MOST]]
    if len(mistakes) == 1:
        raise RecipeError(f"{origin.source}, {lines[0]}")
    if len(mistakes) > MOST:
        lines.append(f"and {len(mistakes) - MOST} more")
    if lines:
        told = "\n".join(f"  {line}" for line in lines)
        raise RecipeError(f"{origin.source} has {len(mistakes)} mistakes:\n{told}")


def shown(value: Any) -> str:
    """A value the way it would be written in a recipe, cut when it is long."""
    if isinstance(value, dict):
        return "keys and values" if value else "{}"
    try:
        return shortened(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):
        return type(value).__name__


def shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else text[:_LONGEST] + "..."
