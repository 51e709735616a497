from __future__ import annotations

from typing import Any

import pytest

from surefoot.judge.diagnosis import diagnosis_by_trial
from surefoot.records import Action, Cause, Decision, Diagnosis, Finding, FindingKind, Note, Outcome
from surefoot.sinks.narrator import EventNarrator
from surefoot.trials.conclusion import TrialEvent, TrialResult

Lines = list[tuple[int, str, str]]


@pytest.fixture
def lines() -> Lines:
    return []


@pytest.fixture
def narrator(lines: Lines) -> EventNarrator:
    return EventNarrator(lambda step, label, text, style: lines.append((step, label, text)))


def refusal(narrator: EventNarrator, attempt: int, step: int, reason: str) -> None:
    position: dict[str, Any] = {"attempt": attempt, "step": step}
    narrator.on_event(Finding(detector="nonfinite", detail=reason, **position))
    narrator.on_event(Decision(action=Action.REFUSE, reason=reason, **position))


def test_consecutive_refusals_are_summed_up_once_updates_apply_again(narrator: EventNarrator, lines: Lines) -> None:
    for attempt in range(30, 38):
        refusal(narrator, attempt, 30, f"the loss is nan, {attempt} bad")
        narrator.on_step(step=30, attempt=attempt, loss=float("nan"))
    narrator.on_step(step=33, attempt=41, loss=2.4)
    assert [label for _, label, _ in lines] == ["finding", "action"]
    narrator.on_step(step=35, attempt=42, loss=2.5)
    assert lines[-1] == (
        35,
        "outcome",
        "8 consecutive updates were refused: updates are applied again, the loss is 2.5",
    )
    assert narrator.actions == {30: "update refused"}


def test_a_rewind_is_reported_at_the_step_of_its_decision(narrator: EventNarrator, lines: Lines) -> None:
    position: dict[str, Any] = {"step": 90, "attempt": 95}
    narrator.on_event(Finding(detector="growth", detail="the loss grows", **position))
    narrator.on_event(
        Diagnosis(cause=Cause.LEARNING_RATE, confidence=0.8, detail="Too high a rate. It is 1.", **position)
    )
    narrator.on_event(Diagnosis(cause=Cause.DRIFT, confidence=0.1, detail="The data drifts", **position))
    narrator.on_event(
        Decision(action=Action.REWIND, reason="the loss grows, and twice", remedy="with half the rate", **position)
    )
    narrator.on_event(Note(step=70, attempt=97, name="rewound", values={"step": 70, "attempt": 74}))
    narrator.on_event(
        Outcome(step=120, attempt=140, action=Action.REWIND, helped=True, detail="it helped: the loss is 2")
    )
    assert lines == [
        (90, "finding", "the loss grows"),
        (90, "cause", "Too high a rate: It is 1. (80% sure)"),
        (90, "action", "rewound to step 70, with half the rate, because twice"),
        (120, "outcome", "it helped: the loss is 2"),
    ]


def test_a_trial_is_reported_with_its_cause_and_what_was_done(narrator: EventNarrator, lines: Lines) -> None:
    position: dict[str, Any] = {"step": 90, "attempt": 95}
    narrator.on_event(Diagnosis(cause=Cause.LABELS, confidence=0.6, detail="Wrong labels. The loss is up", **position))
    decision = Decision(action=Action.REWIND, reason="the loss is up", remedy="past the bad data", **position)
    narrator.on_event(decision)
    narrator.on_event(diagnosis_by_trial(decision, Cause.OPTIMIZER_STATE, "2.3 in place of 10.7", {"probes": 6}))
    values = {"step": 92, "attempt": 74, "kept": 22, "branch": "replay"}
    detail = "trained the 22 updates since step 70 again, as they were"
    narrator.on_event(Note(step=92, attempt=97, name="rewound", detail=detail, values=values))
    narrator.on_event(TrialEvent(result=TrialResult.CONTINUED, detail="2.3 in place of 10.7", **position))
    causes = [text for _, label, text in lines if label == "cause"]
    lines[:] = [line for line in lines if line[1] != "to do"]
    assert causes[0] == "Wrong labels: The loss is up (60% sure)"
    assert causes[1].startswith("The optimizer's state is damaged")
    assert causes[1].endswith("by trial: 2.3 in place of 10.7 (95% sure)")
    assert lines[2:] == [
        (90, "action", "trained the 22 updates since step 70 again, as they were, because the loss is up"),
        (90, "trial", "2.3 in place of 10.7"),
    ]
    assert narrator.actions == {90: "retrained 22 updates"}


def test_an_unknown_cause_has_no_confidence(narrator: EventNarrator, lines: Lines) -> None:
    narrator.on_event(
        Diagnosis(step=5, attempt=5, cause=Cause.UNKNOWN, confidence=0.1, detail="The numbers do not say why.")
    )
    assert lines == [(5, "cause", "The numbers do not say why.")]


def test_observe_mode_reports_what_would_have_been_done(narrator: EventNarrator, lines: Lines) -> None:
    narrator.on_event(Decision(step=5, attempt=5, action=Action.REFUSE, reason="the loss is nan", applied=False))
    assert lines == [(5, "would", "refuse: the loss is nan")]


def test_what_to_change_and_where_to_read_more_are_reported(narrator: EventNarrator, lines: Lines) -> None:
    position: dict[str, Any] = {"step": 90, "attempt": 95}
    advice = ("Check the labels by hand.", "Check the shift.")
    narrator.on_event(Diagnosis(cause=Cause.LABELS, confidence=0.6, detail="Labels. up", advice=advice, **position))
    narrator.on_event(Note(name="incident", values={"folder": "00000090-refuse"}, **position))
    narrator.on_event(Note(name="incident", detail="no incident bundle was written: the disk is full", **position))
    assert lines[1:] == [
        (90, "to do", "Check the labels by hand."),
        (90, "more", "incident bundle incidents/00000090-refuse"),
    ]


def test_a_trial_without_harm_is_not_reported_as_a_rewind(narrator: EventNarrator, lines: Lines) -> None:
    position: dict[str, Any] = {"step": 90, "attempt": 95}
    decision = Decision(action=Action.REWIND, reason="the loss is up", remedy="past the bad data", **position)
    narrator.on_event(decision)
    carried_out = decision.as_json() | {"action": "constrain", "overrides": {"max_lr": [0.003]}}
    narrator.on_event(
        TrialEvent(result=TrialResult.LEFT_ALONE, detail="no harm", values={"carried_out": carried_out}, **position)
    )
    assert lines[-1] == (90, "action", "did not rewind, because no harm; continued with lr capped at 0.003")
    assert not any("rewound" in text for _, _, text in lines)


def test_system_findings_can_be_left_out(lines: Lines) -> None:
    for include in (True, False):
        emitted: Lines = []
        narrator = EventNarrator(
            lambda step, label, text, style, emitted=emitted: emitted.append((step, label, text)),
            include_system=include,
        )
        narrator.on_event(
            Finding(step=1, attempt=1, detector=FindingKind.SLOW_STEPS, detail="steps take twice as long")
        )
        assert bool(emitted) is include


def test_other_events_are_ignored(narrator: EventNarrator, lines: Lines) -> None:
    narrator.on_event(Note(step=0, attempt=0, name="attached"))
    narrator.on_event({"kind": "something new", "step": 0, "attempt": 0})
    assert lines == []
