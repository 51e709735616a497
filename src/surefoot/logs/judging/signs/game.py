"""Two models that play against each other, when one of them wins for good."""

from __future__ import annotations

import numpy as np

from surefoot.logs.answer import State
from surefoot.logs.course import Trace
from surefoot.logs.judging.levels import Curve, curve
from surefoot.logs.judging.signs.base import TWICE, Look, Sign, number
from surefoot.logs.reading.meaning import words_of
from surefoot.records import Cause, Pattern

JUDGES = frozenset({"d", "disc", "discriminator"})
MAKERS = frozenset({"g", "gen", "generator"})


def look(view: Look) -> Sign | None:
    rivals = [trace for role, trace in view.course.others.items() if role.startswith("rival:")]
    judge = _of(rivals, JUDGES)
    maker = _of(rivals, MAKERS)
    if judge is None or maker is None:
        return None
    low, high = curve(judge), curve(maker)
    if low is None or high is None or min(len(low), len(high)) < 10:
        return None
    if low.fall < TWICE or high.last - high.start < TWICE:
        return None
    middle = (low.start + low.last) / 2
    onset = float(low.steps[int(np.flatnonzero(low.level < middle)[0])])
    return Sign(
        verdict=State.WARNING,
        pattern=Pattern.NONE,
        sentence=f"The discriminator is winning since {view.at(onset)}: the generator has little left to learn from.",
        onset=onset,
        causes=((Cause.LEARNING_RATE, 0.4),),
        evidence=(_from_to(judge.name, low), _from_to(maker.name, high)),
        advice=(
            "Lower the discriminator's learning rate, or train it less often than the generator.",
            "Smooth its labels, or add noise to what it sees.",
        ),
    )


def _from_to(name: str, found: Curve) -> str:
    last = number(float(np.median(found.raw[-5:])))
    return f"{name}: {number(float(found.raw[0]))} at the start, {last} at the end"


def _of(rivals: list[Trace], words: frozenset[str]) -> Trace | None:
    return next((trace for trace in rivals if words & set(words_of(trace.name))), None)
