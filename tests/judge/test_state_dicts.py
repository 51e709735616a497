"""Everything in the judge that has state can be saved, put away as JSON, loaded, and goes on as if nothing happened."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from surefoot.judge.detect.bottleneck import Bottleneck
from surefoot.judge.detect.nonfinite import NonFinite
from surefoot.judge.detect.outlandish import Outlandish
from surefoot.judge.history import History
from surefoot.judge.judge import Judge
from surefoot.judge.policy import Policy
from surefoot.records import Row, Verdict


def rows(seed: int, count: int) -> list[Row]:
    """Rows of every kind, many of them in a row of the same kind."""
    rng = random.Random(seed)
    made: list[Row] = []
    verdict, busy = Verdict.LANDED, 0.3
    for i in range(count):
        if rng.random() < 0.2:
            verdict = rng.choice(list(Verdict))
        if rng.random() < 0.004:
            busy = rng.choice((0.2, 0.9, math.nan))
        row = Row(step=i, attempt=i, time=float(i), verdict=verdict, loss=rng.random(), norm=rng.random(), limit=0.5)
        row = replace(row, nonfinite=2.0 if verdict is Verdict.NONFINITE else 0.0, loss_scale=2.0)
        made.append(replace(row, utilisation=busy, seconds=1.0, data_wait=rng.random()))
    return made


def fed(part: Any, row: Row) -> Any:
    """What a part answers to one row."""
    return part.add(row.loss, row.norm) if isinstance(part, History) else part.update(row)


STATEFUL: dict[str, Callable[[], Any]] = {
    "NonFinite": NonFinite,
    "Outlandish": Outlandish,
    "Bottleneck": Bottleneck,
    "History": History,
    "Judge": lambda: Judge(Policy(limit=4, overflow_limit=3)),
}


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("cut", [0, 1, 150, 399])
def test_round_trip(name: str, cut: int) -> None:
    make = STATEFUL[name]
    whole, first, second = make(), make(), make()
    answers = [fed(whole, row) for row in rows(cut, 900)]
    for row in rows(cut, 900)[:cut]:
        fed(first, row)
    saved = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(saved)
    assert second.state_dict() == first.state_dict()
    going_on = [fed(second, row) for row in rows(cut, 900)[cut:]]
    assert repr(going_on) == repr(answers[cut:])
    assert repr(second.state_dict()) == repr(whole.state_dict())
    assert json.loads(json.dumps(first.state_dict())) == saved, "what was saved is no part of what goes on"


def test_nothing_with_state_was_forgotten() -> None:
    judge = Judge(Policy())
    assert {type(d).__name__ for d in judge.detectors} < set(STATEFUL)
