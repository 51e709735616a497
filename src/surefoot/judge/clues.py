"""What a clue is: something that speaks for a cause, with how sure it makes it, and when it holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

from surefoot.judge.case_facts import CaseFacts
from surefoot.judge.evidence import Evidence
from surefoot.records import Cause, Pattern
from surefoot.records import FindingKind as Kind

Test = Callable[[CaseFacts], bool]


@dataclass(frozen=True, slots=True)
class Clue:
    """Something that speaks for a cause."""

    cause: Cause
    confidence: float
    reason: str
    """In words, with facts of the case in braces."""
    when: Test
    each: tuple[Kind, ...] = ()
    """It is looked for in each finding of these detectors, else in the case as a whole."""


def clue_names(clues: Iterable[Clue]) -> Iterator[str]:
    """By cause and place: `labels.2` is the second clue for labels."""
    places = {cause: count(1) for cause in Cause}
    yield from (f"{clue.cause.value}.{next(places[clue.cause])}" for clue in clues)


def found(
    what: Kind | type[Evidence],
    cause: Cause,
    confidence: float,
    test: Callable[[Any], bool] = bool,
    reason: str = "{case.finding.detail}",
) -> Clue:
    """A clue in each finding of a detector, or in each that rests on such evidence for which the test holds."""
    if isinstance(what, Kind):
        return Clue(cause, confidence, reason, lambda case: True, (what,))

    def holds(case: CaseFacts) -> bool:
        held = what.read(case.finding)
        return held is not None and test(held)

    return Clue(cause, confidence, reason, holds, what.kinds)


def shape(pattern: Pattern, cause: Cause, confidence: float, reason: str = "{case.finding.detail}") -> Clue:
    """A clue in the pattern of any finding."""
    return Clue(cause, confidence, reason, lambda case: case.finding.pattern is pattern, tuple(Kind))
