"""All state of the judge survives a round trip through JSON, and a loaded judge continues identically."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from made_rows import NAMES, Source, actions, judged, layers, of, trained

from surefoot.judge.baselines import Baseline, LayerBaselines
from surefoot.judge.detectors.vetoes import NonFinite, NormOutlier
from surefoot.judge.history import History
from surefoot.judge.judge import Judge
from surefoot.judge.policy import Policy
from surefoot.judge.remediation import Remediation
from surefoot.judge.signals import Signals
from surefoot.judge.thresholds import Thresholds
from surefoot.records import Action, Decision, StepMetrics, Verdict

Fed = tuple[StepMetrics, np.ndarray]


@cache
def rows(seed: int, count: int) -> list[Fed]:
    """Rows of every kind with every field set; verdicts and levels persist over several rows."""
    rng, source = random.Random(seed), Source(seed, noise=0.1)
    made: list[Fed] = []
    verdict, busy, times, swells, lr, scale = Verdict.APPLIED, 0.3, 1.0, 1.0, 1e-3, 65536.0
    for i in range(count):
        if rng.random() < 0.05:
            verdict = rng.choice([*Verdict, *[Verdict.APPLIED] * 20])
        if rng.random() < 0.02:
            times, swells, lr = (
                rng.choice((1.0, 1.0, 3.0)),
                rng.choice((1.0, 1.0, 60.0)),
                rng.choice((1e-3, 4e-2, 1e-5)),
            )
        if rng.random() < 0.01:
            busy, scale = rng.choice((0.2, 0.9, math.nan)), rng.choice((65536.0, 8.0))
        row = source.row(times=times, swells=swells, lr=lr, verdict=verdict, norm_limit=0.5, loss_scale=scale)
        if verdict is Verdict.NONFINITE:
            row = replace(row, nonfinite=2.0, loss=rng.choice((math.nan, math.inf)), norm=math.nan)
        clipped = min(1.0, 0.5 / row.norm)
        row = replace(row, clip=0.5, clip_factor=clipped, clip_fraction=0.95, memory=1e9 * (1 + i / 100), samples=32.0)
        row = replace(
            row, update_ratio=lr * rng.random() if i % 10 == 0 else math.nan, momentum=rng.choice((0.9, 0.99))
        )
        row = replace(
            row, utilisation=busy, memory_reserved=1e9, seconds=rng.choice((1.0, 1.2)), data_wait=0.3 * rng.random()
        )
        made.append((row, layers(1000 * seed + i, swells=swells, zeros=0.02 if swells == 1.0 else 0.8)))
    return made


DETECTORS = [type(d).__name__ for d in Judge(Policy()).detectors.all]


class Stateful:
    """A stateful part of the judge and a function that feeds it a row."""

    def __init__(self, part: Any, feed: Callable[[Any, Fed], Any]) -> None:
        self._part, self._feed = part, feed
        self.state_dict, self.load_state_dict = part.state_dict, part.load_state_dict

    def feed(self, fed: Fed) -> Any:
        return self._feed(self._part, fed)


def _update_remediation(part: Remediation, fed: Fed) -> Any:
    return part.update(fed[0], trouble=fed[0].attempt % 7 == 0)


STATEFUL: dict[str, Callable[[], Stateful]] = {
    "NonFinite": lambda: Stateful(NonFinite(), lambda p, fed: p.update(fed[0])),
    "NormOutlier": lambda: Stateful(NormOutlier(Signals(Thresholds())), lambda p, fed: p.update(fed[0])),
    "History": lambda: Stateful(History(), lambda p, fed: p.add(fed[0].loss, fed[0].norm)),
    "Baseline": lambda: Stateful(
        Baseline(32), lambda p, fed: (p.add(fed[0].attempt, fed[0].loss), p.median, p.max, p.sigma, p.last)
    ),
    "Signals": lambda: Stateful(
        Signals(Thresholds()),
        lambda p, fed: (p.compare(fed[0]), p.z, p.log_norm_ratio, p.lr_ratio, p.add(fed[0])),
    ),
    "LayerBaselines": lambda: Stateful(
        LayerBaselines(Thresholds()),
        lambda p, fed: (p.update(fed[1], learn=fed[0].applied), p.norm_change.tolist(), p.zeros_change.tolist()),
    ),
    "Remediation": lambda: Stateful(Remediation(Policy(), Signals(Thresholds())), _update_remediation),
}


@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.parametrize("cut", [0, 1, 150, 399])
def test_round_trip(name: str, cut: int) -> None:
    make = STATEFUL[name]
    whole, first, second = make(), make(), make()
    given = rows(cut, 500)
    expected = [repr(whole.feed(fed)) for fed in given]
    for fed in given[:cut]:
        first.feed(fed)
    saved = json.loads(json.dumps(first.state_dict()))
    second.load_state_dict(saved)
    assert repr(second.state_dict()) == repr(first.state_dict())
    assert [repr(second.feed(fed)) for fed in given[cut:]] == expected[cut:]
    assert repr(second.state_dict()) == repr(whole.state_dict())
    assert repr(json.loads(json.dumps(first.state_dict()))) == repr(saved), (
        "the saved state is not changed by later rows"
    )


@pytest.mark.parametrize("seed", range(2))
def test_reloaded_detectors_find_the_same(seed: int) -> None:
    """Two judges see the same rows; the detectors of one are saved and loaded at every row."""
    whole, other = (Judge(Policy(observe=True), NAMES, owned=5) for _ in range(2))
    kinds_found: set[str] = set()
    for row, tensors in rows(seed, 400):
        for detector in other.detectors.all:
            detector.load_state_dict(json.loads(json.dumps(detector.state_dict())))
        events = whole.update(row, tensors)
        assert repr(other.update(row, tensors)) == repr(events)
        kinds_found |= {e.detector for e in events if e.kind == "finding"}  # pyright: ignore[reportAttributeAccessIssue]
    assert len(kinds_found) > 5, "the rows trigger several detectors"
    for mine, theirs in zip(whole.detectors.all, other.detectors.all, strict=True):
        assert repr(mine.state_dict()) == repr(theirs.state_dict())
        assert set(vars(mine)) == set(vars(theirs))


@pytest.mark.parametrize("seed", range(3))
def test_skipped_rows_do_not_change_detectors(seed: int) -> None:
    """Two judges see the same rows; the detectors of one are called on every row."""
    whole, awake = (Judge(Policy(observe=True), NAMES, owned=5) for _ in range(2))
    for row, tensors in rows(seed + 20, 500):
        for detector in awake.detectors.all:
            detector.watching = True
        assert repr(awake.update(row, tensors)) == repr(whole.update(row, tensors))
    assert repr(awake.state_dict()) == repr(whole.state_dict())


@pytest.fixture(scope="module")
def judge_and_loaded() -> tuple[Judge, Judge]:
    """A judge that has seen many rows, and one that loaded its state."""
    judge, fresh = (Judge(Policy(observe=True), NAMES, owned=5) for _ in range(2))
    for row, tensors in rows(7, 400):
        judge.update(row, tensors)
    fresh.load_state_dict(json.loads(json.dumps(judge.state_dict())))
    return judge, fresh


@pytest.mark.parametrize("name", DETECTORS)
def test_state_dict_covers_every_changing_attribute(name: str, judge_and_loaded: tuple[Judge, Judge]) -> None:
    def state_of(judge: Judge) -> dict[str, str]:
        plain = (bool, int, float, str, list, set, tuple, np.ndarray, type(None))
        attributes = vars(judge.detectors.all[DETECTORS.index(name)])
        kept = {key: repr(value) for key, value in attributes.items() if isinstance(value, plain)}
        return {key: value for key, value in kept.items() if key != "watching"}  # set after loading, until the next row

    judge, fresh = judge_and_loaded
    assert state_of(fresh) == state_of(judge)


@pytest.mark.parametrize("cut", [0, 10, 80, 260])
def test_loaded_judge_continues_identically(cut: int) -> None:
    """Cut where no incident is open."""
    source = Source(5)
    given = [*source.rows(90), source.nan(), *source.rows(180), *[source.nan() for _ in range(3)]]
    given += source.rows(60, lr=4e-2, times=2.0)
    whole, first, second = (Judge(Policy(), NAMES) for _ in range(3))
    expected = [repr(whole.update(row, layers(row.attempt))) for row in given]
    for row in given[:cut]:
        first.update(row, layers(row.attempt))
    assert first.quiet
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert repr(second.state_dict()) == repr(first.state_dict())
    assert (second.proven, second.quiet) == (first.proven, True)
    assert [repr(second.update(row, layers(row.attempt))) for row in given[cut:]] == expected[cut:]
    assert repr(second.state_dict()) == repr(whole.state_dict())


def test_overrides_and_outcomes_survive_loading() -> None:
    judge, source = trained()
    judged(judge, [source.nan() for _ in range(3)])
    judge.rewound(140, 140)
    judged(judge, source.rows(30))
    after = Judge(Policy())
    after.load_state_dict(json.loads(json.dumps(judge.state_dict())))
    going_on = source.rows(200)
    events, loaded_events = judged(judge, going_on), judged(after, going_on)
    assert repr(loaded_events) == repr(events)
    assert actions(loaded_events) == [Action.RELAX]


def test_ongoing_fault_is_found_again_after_loading() -> None:
    judge, source = trained()
    judged(judge, [source.nan(), source.nan()])
    after = Judge(Policy())
    after.load_state_dict(json.loads(json.dumps(judge.state_dict())))
    assert not after.quiet, "the last updates were refused, so no snapshot is due"
    events = judged(after, [source.nan() for _ in range(3)])
    assert actions(events) == [Action.REWIND]
    (decision,) = [d for d in of(Decision, events) if d.action is Action.REWIND]
    assert decision.overrides is not None
    assert decision.overrides.max_lr == (1e-3,)


def test_loaded_judge_has_no_pending_rewind() -> None:
    judge, source = trained()
    saved = json.loads(json.dumps(judge.state_dict()))
    assert actions(judged(judge, [source.nan() for _ in range(3)])) == [Action.REWIND]
    judge.load_state_dict(saved)
    assert judge.quiet
    assert actions(judged(judge, [source.nan() for _ in range(3)])) == [Action.REWIND]


def test_judge_saved_during_an_incident_decides_the_same() -> None:
    judge, source = trained()
    judged(judge, [source.nan(), *source.rows(2, times=3.0, swells=20.0), source.nan()])
    assert not judge.quiet
    saved = judge.state_dict()
    assert types_in(saved) <= {bool, int, float, str, type(None)}, "a checkpoint leaves out other types"
    after = Judge(Policy())
    after.load_state_dict(json.loads(json.dumps(saved)))
    going_on = [*[source.nan() for _ in range(3)], *source.rows(30, times=2.0)]
    events, loaded_events = judged(judge, going_on), judged(after, going_on)
    assert Action.REWIND in actions(events)
    assert repr(loaded_events) == repr(events)


@pytest.mark.parametrize("part", ["book", "treatment", "detectors"])
def test_incomplete_state_is_refused_and_changes_nothing(part: str) -> None:
    (judge, source), fresh = trained(), Judge(Policy())
    judged(judge, [source.nan(), *source.rows(2, times=3.0)])
    saved = judge.state_dict()
    del saved[part]
    with pytest.raises(KeyError):
        fresh.load_state_dict(saved)
    assert repr(fresh.state_dict()) == repr(Judge(Policy()).state_dict())


def test_signs_survive_loading() -> None:
    judge, source = trained()
    judged(judge, [source.row(eval_loss=2.0), *source.rows(10, times=1.5), *source.rows(70)])
    after = Judge(Policy())
    after.load_state_dict(json.loads(json.dumps(judge.state_dict())))
    worse = [source.row(eval_loss=2.8), *source.rows(20), source.row(eval_loss=2.9)]
    assert actions(judged(after, worse)) == [Action.REWIND]


def types_in(value: Any) -> set[type]:
    if isinstance(value, dict):
        return set().union(*map(types_in, value.values()))
    return set().union(*map(types_in, value)) if isinstance(value, list | tuple) else {type(value)}
