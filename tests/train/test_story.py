from __future__ import annotations

from typing import Any

import pytest

from surefoot.records import Action, Cause, Decision, Diagnosis, Finding, Note, Outcome
from surefoot.train.story import Story

Beats = list[tuple[int, str, str]]


@pytest.fixture
def beats() -> Beats:
    return []


@pytest.fixture
def story(beats: Beats) -> Story:
    return Story(lambda step, label, words, style: beats.append((step, label, words)))


def refusal(story: Story, attempt: int, step: int, why: str) -> None:
    where: dict[str, Any] = {"attempt": attempt, "step": step}
    story.event(Finding(detector="nonfinite", detail=why, **where))
    story.event(Decision(action=Action.REFUSE, reason=why, **where))


def test_refusals_in_a_row_are_summed_up_once_it_is_seen_what_came_after(story: Story, beats: Beats) -> None:
    for attempt in range(30, 38):
        refusal(story, attempt, 30, f"the loss is nan, {attempt} bad")
        story.row(step=30, attempt=attempt, loss=float("nan"))
    story.row(step=33, attempt=41, loss=2.4)
    assert [label for _, label, _ in beats] == ["saw", "did"]
    story.row(step=35, attempt=42, loss=2.5)
    assert beats[-1] == (35, "so", "8 updates were refused in a row: those after land again, the loss is 2.5")
    assert story.acts == {30: "update refused"}


def test_a_rewind_is_told_where_it_was_decided_with_its_cause_and_what_came_of_it(story: Story, beats: Beats) -> None:
    at: dict[str, Any] = {"step": 90, "attempt": 95}
    story.event(Finding(detector="growth", detail="the loss grows", **at))
    story.event(Diagnosis(cause=Cause.LEARNING_RATE, confidence=0.8, detail="Too high a rate. It is 1.", **at))
    story.event(Diagnosis(cause=Cause.DRIFT, confidence=0.1, detail="The data drifts", **at))
    story.event(Decision(action=Action.REWIND, reason="the loss grows, and twice", remedy="with half the rate", **at))
    story.event(Note(step=70, attempt=97, name="rewound", values={"step": 70, "attempt": 74}))
    story.event(Outcome(step=120, attempt=140, action=Action.REWIND, helped=True, detail="it helped: the loss is 2"))
    assert beats == [
        (90, "saw", "the loss grows"),
        (90, "why", "Too high a rate: It is 1. (80% sure)"),
        (90, "did", "went back to step 70, with half the rate, because twice"),
        (120, "so", "it helped: the loss is 2"),
    ]


def test_nobody_is_sure_of_a_cause_that_is_not_known(story: Story, beats: Beats) -> None:
    story.event(Diagnosis(step=5, attempt=5, cause=Cause.UNKNOWN, confidence=0.1, detail="The numbers do not say why."))
    assert beats == [(5, "why", "The numbers do not say why.")]


def test_who_only_observes_is_told_what_would_have_been_done(story: Story, beats: Beats) -> None:
    story.event(Decision(step=5, attempt=5, action=Action.REFUSE, reason="the loss is nan", applied=False))
    assert beats == [(5, "would", "refuse: the loss is nan")]


def test_a_slow_machine_is_part_of_the_story_only_where_it_is_wanted(beats: Beats) -> None:
    for machine in (True, False):
        told: Beats = []
        story = Story(lambda step, label, words, style, told=told: told.append((step, label, words)), machine=machine)
        story.event(Finding(step=1, attempt=1, detector="slow_steps", detail="steps take twice as long"))
        assert bool(told) is machine


def test_what_is_of_no_interest_to_a_reader_is_passed_over(story: Story, beats: Beats) -> None:
    story.event(Note(step=0, attempt=0, name="attached"))
    story.event({"kind": "something new", "step": 0, "attempt": 0})
    assert beats == []
