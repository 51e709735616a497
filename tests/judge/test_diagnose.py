"""Whole troubles through the whole judge: which cause is named first, on what grounds, and what is done about it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from made_rows import NAMES, Source, actions, judged, layers, of, trained

from surefoot.judge.cause_catalog import CAUSES
from surefoot.judge.judge import Judge
from surefoot.judge.policy import Policy
from surefoot.records import Action, Cause, Decision, Diagnosis, Event, Finding, StepMetrics, Verdict

Make = Callable[[Source], list[StepMetrics]]


def told(make: Make, *, source: Source | None = None, **more: Any) -> list[Event]:
    judge, source = trained(source=source, **more)
    return judged(judge, make(source))


def named(events: list[Event]) -> list[Cause]:
    return [d.cause for d in of(Diagnosis, events)]


def overflowing(source: Source) -> list[StepMetrics]:
    skips = [source.row(verdict=Verdict.OVERFLOW, loss_scale=2.0 ** (15 - k), nonfinite=2.0) for k in range(10)]
    return [*skips, *source.rows(9, loss_scale=2.0**6)]


@dataclass(frozen=True)
class Trouble:
    make: Make
    cause: Cause
    names: tuple[str, ...] = ()
    scale: float = math.nan


TROUBLES = {
    "NaN once, with attention": Trouble(lambda s: [s.nan(), *s.rows(18)], Cause.ATTENTION_MASK, NAMES),
    "NaN once, without": Trouble(lambda s: [s.nan(), *s.rows(18)], Cause.BAD_BATCH),
    "an infinite loss": Trouble(lambda s: [s.nan(loss=math.inf), *s.rows(9)], Cause.LOG_OF_ZERO, NAMES),
    "gradients alone": Trouble(lambda s: [s.nan(loss=2.0), *s.rows(18)], Cause.TRANSIENT, NAMES),
    "one process": Trouble(lambda s: [s.nan(rank=1), *s.rows(9)], Cause.RANK_FAULT, NAMES),
    "NaN under a loss scale": Trouble(lambda s: [s.nan(), *s.rows(9)], Cause.PRECISION_OVERFLOW, NAMES, 65536.0),
    "NaN after NaN": Trouble(lambda s: [s.nan() for _ in range(3)], Cause.WEIGHTS_DAMAGED, NAMES),
    "bad weights": Trouble(lambda s: [s.nan(nonfinite_params=3.0), *s.rows(9)], Cause.WEIGHTS_DAMAGED, NAMES),
    "a rate 40 times as high": Trouble(
        lambda s: [s.row(lr=4e-2, times=1.25**k) for k in range(1, 12)], Cause.LEARNING_RATE
    ),
    "a momentum above one": Trouble(lambda s: s.rows(3, momentum=1.02), Cause.MOMENTUM),
    "a scale that is halved": Trouble(overflowing, Cause.PRECISION_OVERFLOW, scale=65536.0),
    "a scale set too low": Trouble(lambda s: s.rows(5, loss_scale=1.0), Cause.PRECISION_UNDERFLOW, scale=65536.0),
    "one batch": Trouble(lambda s: [s.row(times=6.0, swells=10.0), *s.rows(9)], Cause.BAD_BATCH),
    "a rate of nothing": Trouble(lambda s: s.rows(9, lr=0.0), Cause.PLATEAU),
}


@pytest.mark.parametrize("name", TROUBLES)
def test_the_cause_is_named_first(name: str) -> None:
    trouble = TROUBLES[name]
    source = Source(1) if math.isnan(trouble.scale) else Source(1, loss_scale=trouble.scale)
    events = told(trouble.make, source=source, names=trouble.names)
    assert named(events)[0] is trouble.cause
    sure = [d.confidence for d in of(Diagnosis, events)]
    assert sure == sorted(sure, reverse=True)
    assert len(sure) <= 3
    assert all(0 < s < 1 for s in sure)


@pytest.mark.parametrize("name", TROUBLES)
def test_every_event_knows_its_step_and_attempt(name: str) -> None:
    judge, source = trained(names=TROUBLES[name].names)
    source.attempt += 17  # updates that were tried and did not land
    for row in TROUBLES[name].make(source):
        for event in judge.update(row):
            assert (event.step, event.attempt, event.time) == (row.step, row.attempt, row.time)
            assert event.as_json()["attempt"] == row.attempt


def test_a_diagnosis_says_what_it_rests_on_and_what_to_do() -> None:
    first, *others = of(Diagnosis, told(lambda s: [s.nan(), *s.rows(18)], names=NAMES))
    assert first.evidence["path"] == (
        "within the first 1000 steps: yes; mixed precision: no; unusually large gradients: no; "
        "a good state to go back to: yes"
    )
    assert first.evidence["findings"] == ["nonfinite"]
    assert first.evidence["normal_loss"] > 0
    assert set(CAUSES[first.cause].remedies) < set(first.advice), "the cause's remedies, then those of the tree"
    assert "Resume from the last good state with adjusted settings." in first.advice
    assert first.detail.startswith(CAUSES[first.cause].sentence)
    assert [d.advice for d in others] == [CAUSES[d.cause].remedies for d in others]


def test_one_trouble_is_named_once_and_the_next_one_again() -> None:
    judge, source = trained()
    first = judged(judge, [source.nan(), *source.rows(4), source.nan(), *source.rows(100)])
    assert len(of(Finding, first)) == 2
    assert named(first) == [Cause.BAD_BATCH]
    assert named(judged(judge, [source.nan(loss=math.inf), *source.rows(9)]))[0] is Cause.LOG_OF_ZERO


def test_where_a_value_became_nonfinite_is_no_certainty_about_the_cause() -> None:
    """A module of a kind that no rule knows: the place is known, the cause is not."""
    judge, source = trained()
    row = source.nan()
    judge.update(row)
    judge.located(row, "blocks.3.mixer", "Mixer", inputs=False, weights=False)
    unknown = [d for d in of(Diagnosis, judged(judge, source.rows(18))) if d.cause is Cause.UNKNOWN]
    assert all(d.confidence <= 0.1 for d in unknown)
    assert any("blocks.3.mixer" in d.detail for d in unknown), "the place is told all the same"


def backward_made_it(source: Source, tensors: list[int]) -> tuple[list[StepMetrics], list[np.ndarray]]:
    """Three updates whose loss is finite and whose gradients are not, in these tensors; healthy ones between."""
    rows, stats = [], []
    for _ in range(3):
        rows += [source.nan(loss=2.0), *source.rows(2)]
        bad = layers(len(rows))
        bad[tensors, 5] = 4.0
        stats += [bad, layers(len(rows) + 1), layers(len(rows) + 2)]
    return rows + source.rows(18), stats


def test_a_value_made_in_backward_again_and_again_is_no_passing_fault() -> None:
    judge, source = trained(names=NAMES)
    first, *_ = of(Diagnosis, judged(judge, *backward_made_it(source, [0, 1, 2])))
    assert first.cause is not Cause.TRANSIENT
    assert first.confidence < 0.5, "where it was made is not known, so neither is the cause"
    assert "in the backward pass" in first.detail
    assert "bit" not in first.detail


def test_one_tensor_alone_was_disturbed_from_outside() -> None:
    judge, source = trained(names=NAMES)
    first, *_ = of(Diagnosis, judged(judge, *backward_made_it(source, [3])))
    assert first.cause is Cause.TRANSIENT
    assert "in one tensor alone" in first.detail


def rewind(events: list[Event]) -> Decision:
    assert actions(events) == [Action.REWIND]
    (decision,) = [d for d in of(Decision, events) if d.action is Action.REWIND]
    assert decision.overrides is not None
    return decision


def test_a_rate_that_harms_is_held_at_what_it_was() -> None:
    decision = rewind(told(lambda s: [s.row(lr=4e-2, times=1 + 0.25 * k) for k in range(1, 60)]))
    assert decision.cause is Cause.LEARNING_RATE
    assert decision.overrides is not None
    assert decision.overrides.max_lr == (1e-3,)
    assert decision.max_attempt == 150, "to a state from before the rate was raised"


def test_a_rate_that_crept_up_in_vain_is_held_first_and_taken_back_when_that_does_not_help() -> None:
    """The wrong rate has long been the usual one when the harm shows."""
    events = told(lambda s: [s.row(lr=min(2.0**k, 40.0) * 1e-3, times=1 + 0.01 * k) for k in range(1, 60)])
    held, back = [d for d in of(Decision, events) if d.action in (Action.CONSTRAIN, Action.REWIND)]
    assert (held.action, back.action) == (Action.CONSTRAIN, Action.REWIND)
    for decision in held, back:
        assert decision.cause is Cause.LEARNING_RATE
        assert decision.overrides is not None
        assert decision.overrides.max_lr == (1e-3,)
    assert back.max_attempt <= 152, "to a state from before the rate was out of all measure"


def test_a_rate_that_does_no_harm_is_told_and_left_alone() -> None:
    events = told(lambda s: s.rows(100, lr=4e-2))
    assert named(events)[0] is Cause.LEARNING_RATE
    assert actions(events) == []


def test_a_momentum_that_never_forgets_is_taken_back() -> None:
    decision = rewind(told(lambda s: s.rows(3, momentum=1.02)))
    assert decision.cause is Cause.MOMENTUM
    assert decision.overrides is not None
    assert decision.overrides.max_momentum == (0.9,)


def test_a_momentum_that_remembers_too_long_is_held_first_and_taken_back_when_that_does_not_help() -> None:
    events = told(lambda s: [s.row(momentum=0.995, times=1 + 0.012 * k) for k in range(60)])
    assert actions(events) == [Action.CONSTRAIN, Action.REWIND]
    for decision in of(Decision, events):
        assert decision.cause is Cause.MOMENTUM
        assert decision.overrides is not None
        assert decision.overrides.max_momentum == (0.9,)


def test_caps_stand_in_the_place_of_their_optimizer() -> None:
    """Only the second optimizer has momentum, and its rate is another one."""
    judge, source = trained(rows=0)
    for _ in range(120):
        judged(judge, [source.row(momentum=math.nan)])
        judged(judge, [source.row(optimizer=1, lr=0.1, momentum=0.8)])
    decision = rewind(judged(judge, [source.nan(momentum=math.nan) for _ in range(3)]))
    assert decision.overrides is not None
    assert decision.overrides.max_lr == (1e-3, 0.1)
    assert decision.overrides.max_momentum == (math.inf, 0.8)


def test_a_scale_that_collapsed_is_set_back_and_if_that_does_not_help_float32_follows() -> None:
    events = told(overflowing, source=Source(1, loss_scale=65536.0))
    set_back, wider = [d for d in of(Decision, events) if d.action in (Action.CONSTRAIN, Action.REWIND)]
    assert set_back.action is Action.CONSTRAIN
    assert set_back.loss_scale == 65536.0
    assert wider.action is Action.REWIND
    assert wider.cause is Cause.PRECISION_OVERFLOW
    assert wider.overrides is not None
    assert wider.overrides.float32


def test_new_trouble_late_in_a_long_one_is_seen() -> None:
    """Other data keep a case open for long; batches that are not finite in the midst of it still take the run back."""
    judge, source = trained()
    assert actions(judged(judge, source.rows(75, times=1.6))) == []
    assert actions(judged(judge, [source.nan() for _ in range(3)])) == [Action.REWIND]


@pytest.mark.parametrize("adaptive", [True, False])
def test_a_loss_in_another_unit_harms_only_who_does_not_divide_by_it(adaptive: bool) -> None:
    judge, source = Judge(Policy(), NAMES, adaptive=adaptive), Source(1)
    judged(judge, source.rows(150), (layers(k) for k in range(150)))
    events = judged(judge, source.rows(40, times=4.0, swells=4.0), (layers(k, swells=4.0) for k in range(40)))
    assert actions(events)[:1] == ([] if adaptive else [Action.REWIND])


def test_a_way_back_does_not_change_the_unit_a_loss_is_told_in() -> None:
    """It is clipped from then on; that the loss still reads forty times what it was is no harm."""
    judge, source = Judge(Policy(), NAMES, adaptive=False), Source(1)
    judged(judge, source.rows(150), (layers(k) for k in range(150)))
    events = judged(judge, source.rows(6, times=40.0, swells=40.0), (layers(k, swells=40.0) for k in range(6)))
    assert actions(events) == [Action.REWIND]
    judge.rewound(149, 150)
    apart = (layers(k, swells=40.0, which=range(k % 3, 7, 2)) for k in range(30))  # this time it cannot be told again
    after = judged(judge, source.rows(30, times=40.0, swells=40.0), apart)
    assert any(f.severe for f in of(Finding, after) if f.detector == "loss_level")
    assert "loss_rescaled" not in {f.detector for f in of(Finding, after)}
    assert actions(after) == []


def test_trouble_without_a_break_has_no_rhythm() -> None:
    events = told(lambda s: [s.nan(loss=2.0) for _ in range(30)], policy=Policy(observe=True))
    assert "periodic_spikes" not in {f.detector for f in of(Finding, events)}
