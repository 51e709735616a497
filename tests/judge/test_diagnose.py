"""Whole incidents through the whole judge: the cause ranked first, its evidence, and the action taken."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from made_rows import NAMES, Source, actions, judged, layers, of, trained

from surefoot.judge.cause_catalog import CAUSES
from surefoot.judge.diagnosis import diagnose_incident
from surefoot.judge.evidence import TimeEvidence
from surefoot.judge.incident import Incident, IncidentStep
from surefoot.judge.judge import Judge
from surefoot.judge.policy import Policy
from surefoot.records import (
    Action,
    Cause,
    Decision,
    Diagnosis,
    Event,
    Finding,
    FindingKind,
    Severity,
    StepMetrics,
    Verdict,
)

Make = Callable[[Source], list[StepMetrics]]


def events_of(make: Make, *, source: Source | None = None, **more: Any) -> list[Event]:
    judge, source = trained(source=source, **more)
    return judged(judge, make(source))


def named(events: list[Event]) -> list[Cause]:
    return [d.cause for d in of(Diagnosis, events)]


def overflowing(source: Source) -> list[StepMetrics]:
    skips = [source.row(verdict=Verdict.OVERFLOW, loss_scale=2.0 ** (15 - k), nonfinite=2.0) for k in range(10)]
    return [*skips, *source.rows(9, loss_scale=2.0**6)]


@dataclass(frozen=True)
class IncidentCase:
    make: Make
    cause: Cause
    names: tuple[str, ...] = ()
    scale: float = math.nan


CASES = {
    "NaN once, with attention": IncidentCase(lambda s: [s.nan(), *s.rows(18)], Cause.ATTENTION_MASK, NAMES),
    "NaN once, without": IncidentCase(lambda s: [s.nan(), *s.rows(18)], Cause.BAD_BATCH),
    "an infinite loss": IncidentCase(lambda s: [s.nan(loss=math.inf), *s.rows(9)], Cause.LOG_OF_ZERO, NAMES),
    "gradients alone": IncidentCase(lambda s: [s.nan(loss=2.0), *s.rows(18)], Cause.TRANSIENT, NAMES),
    "one process": IncidentCase(lambda s: [s.nan(rank=1), *s.rows(9)], Cause.RANK_FAULT, NAMES),
    "NaN under a loss scale": IncidentCase(lambda s: [s.nan(), *s.rows(9)], Cause.PRECISION_OVERFLOW, NAMES, 65536.0),
    "NaN after NaN": IncidentCase(lambda s: [s.nan() for _ in range(3)], Cause.WEIGHTS_DAMAGED, NAMES),
    "bad weights": IncidentCase(lambda s: [s.nan(nonfinite_params=3.0), *s.rows(9)], Cause.WEIGHTS_DAMAGED, NAMES),
    "lr 40 times as high": IncidentCase(
        lambda s: [s.row(lr=4e-2, times=1.25**k) for k in range(1, 12)], Cause.LEARNING_RATE
    ),
    "momentum above one": IncidentCase(lambda s: s.rows(3, momentum=1.02), Cause.MOMENTUM),
    "loss scale halved repeatedly": IncidentCase(overflowing, Cause.PRECISION_OVERFLOW, scale=65536.0),
    "loss scale set too low": IncidentCase(
        lambda s: s.rows(5, loss_scale=1.0), Cause.PRECISION_UNDERFLOW, scale=65536.0
    ),
    "one batch": IncidentCase(lambda s: [s.row(times=6.0, swells=10.0), *s.rows(9)], Cause.BAD_BATCH),
    "lr of zero": IncidentCase(lambda s: s.rows(9, lr=0.0), Cause.PLATEAU),
}


@pytest.mark.parametrize("name", CASES)
def test_true_cause_is_ranked_first(name: str) -> None:
    case = CASES[name]
    source = Source(1) if math.isnan(case.scale) else Source(1, loss_scale=case.scale)
    events = events_of(case.make, source=source, names=case.names)
    assert named(events)[0] is case.cause
    confidences = [d.confidence for d in of(Diagnosis, events)]
    assert confidences == sorted(confidences, reverse=True)
    assert len(confidences) <= 3
    assert all(0 < s < 1 for s in confidences)


@pytest.mark.parametrize("name", CASES)
def test_every_event_has_its_step_and_attempt(name: str) -> None:
    judge, source = trained(names=CASES[name].names)
    source.attempt += 17  # attempts that were not applied
    for row in CASES[name].make(source):
        for event in judge.update(row):
            assert (event.step, event.attempt, event.time) == (row.step, row.attempt, row.time)
            assert event.as_json()["attempt"] == row.attempt


def test_diagnosis_has_evidence_and_advice() -> None:
    first, *others = of(Diagnosis, events_of(lambda s: [s.nan(), *s.rows(18)], names=NAMES))
    assert first.evidence["path"] == (
        "within the first 1000 steps: yes; mixed precision: no; unusually large gradients: no; "
        "a good state to go back to: yes"
    )
    assert first.evidence["findings"] == ["nonfinite"]
    assert first.evidence["normal_loss"] > 0
    assert set(CAUSES[first.cause].remedies) < set(first.advice), (
        "the cause's remedies, then those of the decision tree"
    )
    assert "Resume from the last good state with adjusted settings." in first.advice
    assert first.detail.startswith(CAUSES[first.cause].sentence)
    assert [d.advice for d in others] == [CAUSES[d.cause].remedies for d in others]


def test_each_incident_is_diagnosed_once() -> None:
    judge, source = trained()
    first = judged(judge, [source.nan(), *source.rows(4), source.nan(), *source.rows(100)])
    assert len(of(Finding, first)) == 2
    assert named(first) == [Cause.BAD_BATCH]
    assert named(judged(judge, [source.nan(loss=math.inf), *source.rows(9)]))[0] is Cause.LOG_OF_ZERO


def test_known_location_of_a_nonfinite_value_does_not_settle_the_cause() -> None:
    """No rule covers this kind of module: the location is known, the cause is not."""
    judge, source = trained()
    row = source.nan()
    judge.update(row)
    judge.located(row, "blocks.3.mixer", "Mixer", inputs=False, weights=False)
    unknown = [d for d in of(Diagnosis, judged(judge, source.rows(18))) if d.cause is Cause.UNKNOWN]
    assert all(d.confidence <= 0.1 for d in unknown)
    assert any("blocks.3.mixer" in d.detail for d in unknown), "the location is still reported"


def nonfinite_in_backward(source: Source, tensors: list[int]) -> tuple[list[StepMetrics], list[np.ndarray]]:
    """Three updates with a finite loss and non-finite gradients in these tensors; healthy updates between."""
    rows, stats = [], []
    for _ in range(3):
        rows += [source.nan(loss=2.0), *source.rows(2)]
        bad = layers(len(rows))
        bad[tensors, 5] = 4.0
        stats += [bad, layers(len(rows) + 1), layers(len(rows) + 2)]
    return rows + source.rows(18), stats


def test_repeated_nonfinite_backward_is_no_transient_fault() -> None:
    judge, source = trained(names=NAMES)
    first, *_ = of(Diagnosis, judged(judge, *nonfinite_in_backward(source, [0, 1, 2])))
    assert first.cause is not Cause.TRANSIENT
    assert first.confidence < 0.5, "the location is unknown, so the cause is uncertain"
    assert "in the backward pass" in first.detail
    assert "bit" not in first.detail


def test_single_bad_tensor_is_a_transient_fault() -> None:
    judge, source = trained(names=NAMES)
    first, *_ = of(Diagnosis, judged(judge, *nonfinite_in_backward(source, [3])))
    assert first.cause is Cause.TRANSIENT
    assert "in one tensor alone" in first.detail


def rewind(events: list[Event]) -> Decision:
    assert actions(events) == [Action.REWIND]
    (decision,) = [d for d in of(Decision, events) if d.action is Action.REWIND]
    assert decision.overrides is not None
    return decision


def test_harmful_lr_is_capped_at_its_earlier_value() -> None:
    decision = rewind(events_of(lambda s: [s.row(lr=4e-2, times=1 + 0.25 * k) for k in range(1, 60)]))
    assert decision.cause is Cause.LEARNING_RATE
    assert decision.overrides is not None
    assert decision.overrides.max_lr == (1e-3,)
    assert decision.max_attempt == 150, "to a snapshot from before the lr was raised"


def test_slowly_raised_lr_is_capped_first_and_rewound_if_that_does_not_help() -> None:
    """By the time of the harm the wrong lr is the baseline."""
    events = events_of(lambda s: [s.row(lr=min(2.0**k, 40.0) * 1e-3, times=1 + 0.01 * k) for k in range(1, 60)])
    constrained, rewound = [d for d in of(Decision, events) if d.action in (Action.CONSTRAIN, Action.REWIND)]
    assert (constrained.action, rewound.action) == (Action.CONSTRAIN, Action.REWIND)
    for decision in constrained, rewound:
        assert decision.cause is Cause.LEARNING_RATE
        assert decision.overrides is not None
        assert decision.overrides.max_lr == (1e-3,)
    assert rewound.max_attempt <= 152, "to a snapshot from before the lr was far too high"


def test_harmless_raised_lr_is_reported_without_action() -> None:
    events = events_of(lambda s: s.rows(100, lr=4e-2))
    assert named(events)[0] is Cause.LEARNING_RATE
    assert actions(events) == []


def test_momentum_above_one_is_rewound() -> None:
    decision = rewind(events_of(lambda s: s.rows(3, momentum=1.02)))
    assert decision.cause is Cause.MOMENTUM
    assert decision.overrides is not None
    assert decision.overrides.max_momentum == (0.9,)


def test_too_high_momentum_is_capped_first_and_rewound_if_that_does_not_help() -> None:
    events = events_of(lambda s: [s.row(momentum=0.995, times=1 + 0.012 * k) for k in range(60)])
    assert actions(events) == [Action.CONSTRAIN, Action.REWIND]
    for decision in of(Decision, events):
        assert decision.cause is Cause.MOMENTUM
        assert decision.overrides is not None
        assert decision.overrides.max_momentum == (0.9,)


def test_caps_apply_to_their_own_optimizer() -> None:
    """Only the second optimizer has momentum, and it has another lr."""
    judge, source = trained(rows=0)
    for _ in range(120):
        judged(judge, [source.row(momentum=math.nan)])
        judged(judge, [source.row(optimizer=1, lr=0.1, momentum=0.8)])
    decision = rewind(judged(judge, [source.nan(momentum=math.nan) for _ in range(3)]))
    assert decision.overrides is not None
    assert decision.overrides.max_lr == (1e-3, 0.1)
    assert decision.overrides.max_momentum == (math.inf, 0.8)


def test_collapsed_loss_scale_is_reset_and_then_float32_is_tried() -> None:
    events = events_of(overflowing, source=Source(1, loss_scale=65536.0))
    set_back, wider = [d for d in of(Decision, events) if d.action in (Action.CONSTRAIN, Action.REWIND)]
    assert set_back.action is Action.CONSTRAIN
    assert set_back.loss_scale == 65536.0
    assert wider.action is Action.REWIND
    assert wider.cause is Cause.PRECISION_OVERFLOW
    assert wider.overrides is not None
    assert wider.overrides.float32


def test_new_fault_late_in_a_long_incident_is_acted_on() -> None:
    """New data keeps an incident open for long; non-finite batches during it still cause a rewind."""
    judge, source = trained()
    assert actions(judged(judge, source.rows(75, times=1.6))) == []
    assert actions(judged(judge, [source.nan() for _ in range(3)])) == [Action.REWIND]


@pytest.mark.parametrize("adaptive", [True, False])
def test_rescaled_loss_harms_only_non_adaptive_optimizers(adaptive: bool) -> None:
    judge, source = Judge(Policy(), NAMES, adaptive=adaptive), Source(1)
    judged(judge, source.rows(150), (layers(k) for k in range(150)))
    events = judged(judge, source.rows(40, times=4.0, swells=4.0), (layers(k, swells=4.0) for k in range(40)))
    assert actions(events)[:1] == ([] if adaptive else [Action.REWIND])


def test_rewind_does_not_change_the_scale_of_the_loss() -> None:
    """Updates are clipped from then on; a loss still 40 times as high is no harm."""
    judge, source = Judge(Policy(), NAMES, adaptive=False), Source(1)
    judged(judge, source.rows(150), (layers(k) for k in range(150)))
    events = judged(judge, source.rows(6, times=40.0, swells=40.0), (layers(k, swells=40.0) for k in range(6)))
    assert actions(events) == [Action.REWIND]
    judge.rewound(149, 150)
    apart = (
        layers(k, swells=40.0, which=range(k % 3, 7, 2)) for k in range(30)
    )  # scattered, so that the rescaling is not detected again
    after = judged(judge, source.rows(30, times=40.0, swells=40.0), apart)
    assert any(f.severe for f in of(Finding, after) if f.detector == "loss_level")
    assert "loss_rescaled" not in {f.detector for f in of(Finding, after)}
    assert actions(after) == []


def test_uninterrupted_incident_is_not_periodic() -> None:
    events = events_of(lambda s: [s.nan(loss=2.0) for _ in range(30)], policy=Policy(observe=True))
    assert "periodic_spikes" not in {f.detector for f in of(Finding, events)}


@pytest.mark.parametrize("data", [True, False])
def test_a_slow_machine_is_no_reason_to_change_the_training(data: bool) -> None:
    row = StepMetrics(step=5000, attempt=5000, time=0.0, loss=1.0, norm=1.0, lr=1e-3)
    slow = Finding(
        step=5000,
        attempt=5000,
        detector=FindingKind.SLOW_STEPS,
        detail="steps take twice as long",
        severity=Severity.REPORT_ONLY,
        evidence=TimeEvidence(data=data, seconds=2.0, usual=1.0).as_dict(),
    )
    now = IncidentStep(
        row=row,
        z=0.0,
        log_norm_ratio=0.0,
        lr_ratio=1.0,
        loss_factor=1.0,
        front_layers_lead=0.0,
        attention_lead=0.0,
        silent_fraction=0.0,
        input_novelty=0.0,
    )
    incident = Incident(onset=5000, start_loss=4.0, normal_loss=1.0, steps=[now], findings=[slow])
    first = diagnose_incident(row, incident, has_good_state=True)[0]
    assert (first.cause is Cause.DATA_STARVATION) is data
    advice = " ".join(first.advice).lower()
    assert "learning rate" not in advice
    assert "initialisation" not in advice
    assert "path" not in first.evidence, "the decision tree is about runs that failed"
