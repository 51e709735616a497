"""Every message is checked against what it claims: an event is built, and the sentence about it is read."""

from __future__ import annotations

import math
from typing import Any

import pytest

from surefoot.judge.cause_catalog import CAUSES
from surefoot.judge.remedies import ALL_REMEDIES
from surefoot.records import (
    Action,
    Cause,
    Decision,
    Diagnosis,
    Event,
    Finding,
    FindingKind,
    Note,
    Outcome,
    Severity,
    StepOverrides,
)
from surefoot.story.action_sentences import OVERRIDE_TEXTS, decision_sentence, overrides_text
from surefoot.story.cause_phrases import CAUSE_PHRASES
from surefoot.story.group_events import EventGroup, EventGrouper
from surefoot.story.incident_block import incident_block, incident_sentence
from surefoot.story.incident_story import IncidentLevel, IncidentStory
from surefoot.story.row_facts import RowFacts
from surefoot.story.tell_incident import tell_incident
from surefoot.trials.branches import BranchId
from surefoot.trials.conclusion import TrialEvent, TrialResult

AT: dict[str, Any] = {"step": 90, "attempt": 95}
JUMP = Finding(**AT, detector=FindingKind.JUMP, detail="the loss is 9, 20 sigmas above normal")


def rows_until(last: int, *, refused: tuple[int, ...] = ()) -> RowFacts:
    verdicts = [1 if k in refused else 0 for k in range(last + 1)]
    return RowFacts(list(range(last + 1)), verdicts, [2.5] * (last + 1))


def told(*events: Event, rows: RowFacts | None = None) -> IncidentStory:
    group = EventGroup()
    for event in events:
        group.add(event.as_json())
    return tell_incident(group, rows or RowFacts())


@pytest.mark.parametrize("cause", list(Cause))
def test_each_cause_is_named_with_its_confidence_evidence_and_remedy(cause: Cause) -> None:
    detail = f"{CAUSES[cause].sentence} the norm is 7 times the limit"
    story = told(JUMP, Diagnosis(**AT, cause=cause, confidence=0.85, detail=detail, advice=CAUSES[cause].remedies))
    first = story.first_cause
    assert first is not None
    assert first.sentence == CAUSES[cause].sentence
    assert first.evidence == ("the norm is 7 times the limit", f"step 90: {JUMP.detail}")
    block = incident_block(story)
    assert "the norm is 7 times the limit" in block
    if cause is Cause.UNKNOWN:
        assert "sure" not in block, "nobody is sure of an unknown cause"
        assert "the numbers do not show it" in block
        assert block.startswith(f"step 90: {JUMP.detail}\n")
    else:
        assert block.startswith(f"step 90: {CAUSE_PHRASES[cause]} (85% sure)\n")
    assert CAUSES[cause].remedies[0] in block


@pytest.mark.parametrize("kind", list(FindingKind))
def test_each_finding_is_told_by_its_own_words(kind: FindingKind) -> None:
    story = told(Finding(**AT, detector=kind, detail=f"seen by {kind}"))
    assert incident_block(story).startswith(f"step 90: seen by {kind}\n")
    assert story.findings[0].detector == kind


@pytest.mark.parametrize("remedy", ALL_REMEDIES, ids=lambda remedy: remedy.id.value)
def test_each_remedy_is_told_as_it_was_carried_out(remedy: Any) -> None:
    action = Action.REWIND if remedy.rewind else Action.CONSTRAIN
    decision = Decision(**AT, action=action, reason="the loss jumped", remedy=remedy.text, remedy_id=remedy.id)
    rewound = Note(step=70, attempt=97, name="rewound", values={"step": 70, "attempt": 74, "lost": 22})
    story = told(JUMP, decision, *([rewound] if remedy.rewind else []))
    (done,) = story.actions
    assert done.sentence.endswith(remedy.text)
    assert done.sentence.startswith("rewound to step 70, " if remedy.rewind else "continued ")
    assert ("22 updates lost" in incident_block(story)) is remedy.rewind
    assert story.level is IncidentLevel.ACTED
    assert (story.helped, story.outcome) == (None, "not known yet")


@pytest.mark.parametrize("action", list(Action))
def test_what_is_only_observed_is_never_told_as_done(action: Action) -> None:
    story = told(JUMP, Decision(**AT, action=action, reason="the loss jumped", remedy="in float32", applied=False))
    assert all(done.sentence.startswith("would have") for done in story.actions)
    assert len(story.actions) == 1
    assert story.level is IncidentLevel.SUSPECTED
    assert story.helped is None


@pytest.mark.parametrize("action", [a for a in Action if a not in (Action.REFUSE, Action.REWIND)])
def test_each_other_action_has_a_sentence_of_its_own(action: Action) -> None:
    sentence = decision_sentence(Decision(**AT, action=action, reason="why", remedy="in float32").as_json())
    words = {"constrain": "continued in float32", "relax": "lifted", "accept": "accepted", "stop": "stopped the run"}
    words["reduce_memory"] = "in smaller pieces"
    assert words[action] in sentence


def test_a_rewind_that_was_not_carried_out_is_not_told_as_one() -> None:
    decision = Decision(**AT, action=Action.REWIND, reason="the loss jumped", remedy="past the bad data")
    story = told(JUMP, decision, Note(**AT, name="failed", detail="rewind: no snapshots are kept"))
    assert "could not be done: rewind: no snapshots are kept" in incident_block(story)
    assert "rewound" not in incident_block(story)
    assert story.level is IncidentLevel.SUSPECTED
    waiting = told(JUMP, decision)
    assert waiting.actions[0].sentence == "decided to go back to the last good state, past the bad data"


def test_a_restart_takes_the_place_of_the_rewind_that_was_decided_first() -> None:
    rewind = Decision(**AT, action=Action.REWIND, reason="the loss jumped", remedy="past the bad data")
    restart = Decision(**AT, action=Action.REWIND, reason="broken", remedy="restarted from the initial state")
    values = {"step": 94, "attempt": -1, "kept": 94, "lost": 8}
    note = Note(step=94, attempt=97, name="rewound", detail="trained the 94 updates since step 0 again", values=values)
    (done,) = told(JUMP, rewind, restart, note).actions
    assert done.sentence == "trained the 94 updates since step 0 again"
    assert (done.updates_lost, done.updates_kept) == (8, 94)


def test_a_trial_that_finds_no_harm_is_not_told_as_a_rewind() -> None:
    decision = Decision(**AT, action=Action.REWIND, reason="the loss jumped", remedy="past the bad data")
    constrained = decision.as_json() | {"action": "constrain", "overrides": {"max_lr": [0.003]}}
    trial = TrialEvent(
        **AT,
        result=TrialResult.LEFT_ALONE,
        detail="no branch ends better than the run as it is: it is left alone",
        values={"carried_out": constrained, "proposed": False, "best": "nothing"},
    )
    (done,) = told(JUMP, decision, trial).actions
    assert done.action == "constrain"
    assert done.sentence == (
        "did not rewind, because no branch ends better than the run as it is; continued with lr capped at 0.003"
    )


@pytest.mark.parametrize("branch", list(BranchId))
def test_each_branch_of_a_trial_is_described(branch: BranchId) -> None:
    row = {"branch": branch.value, "probe_loss": 0.25, "steps": 12, "seconds": 0.1}
    values = {"branches": [row], "best": branch.value, "probes": 8, "reference": 0.5}
    trial = TrialEvent(**AT, result=TrialResult.CONTINUED, detail="it is lower", values=values)
    decision = Decision(**AT, action=Action.REWIND, reason="the loss jumped")
    (table,) = told(JUMP, decision, trial).trials
    (told_row,) = table.branches
    assert told_row.text
    assert "_" not in told_row.text, "words, and not a name of the code"
    assert (told_row.probe_loss, told_row.steps) == (0.25, 12)
    assert told_row.chosen is (branch is not BranchId.NOTHING)


@pytest.mark.parametrize("name", [name for name, _ in OVERRIDE_TEXTS])
def test_each_override_is_told(name: str) -> None:
    value: Any = {"float32": True, "zero_stale_grads": True, "loss_ceiling": 7.5, "rewarmup_steps": 30}.get(name, 0.25)
    value = (value,) if isinstance(getattr(StepOverrides(), name), tuple) else value
    text = overrides_text(StepOverrides(**{name: value}).as_json())
    shown = {"float32": "float32", "zero_stale_grads": "zeroed", "loss_ceiling": "7.5", "rewarmup_steps": "30"}
    assert shown.get(name, "0.25") in text
    assert overrides_text(StepOverrides().as_json()) == ""


@pytest.mark.parametrize("helped", [True, False])
def test_the_outcome_is_that_of_the_event(helped: bool) -> None:
    detail = "it helped: the loss is 2" if helped else "it did not help"
    decision = Decision(**AT, action=Action.REWIND, reason="the loss jumped")
    story = told(JUMP, decision, Outcome(step=99, attempt=120, action=Action.REWIND, helped=helped, detail=detail))
    assert (story.helped, story.outcome) == (helped, detail)


def refusal(attempt: int) -> list[Event]:
    at: dict[str, Any] = {"step": 90, "attempt": attempt}
    reason = "the loss is nan"
    finding = Finding(**at, detector=FindingKind.NONFINITE, detail=reason)
    return [finding, Decision(**at, action=Action.REFUSE, reason=reason)]


def test_refusals_are_counted_and_called_consecutive_only_if_they_are() -> None:
    both = told(*refusal(95), *refusal(96), rows=rows_until(110, refused=(95, 96)))
    assert both.outcome == "2 consecutive updates were refused: updates are applied again, the loss is 2.5"
    apart = told(*refusal(80), *refusal(96), rows=rows_until(110, refused=(80, 96)))
    assert apart.outcome == "2 updates were refused: updates are applied again, the loss is 2.5"
    assert apart.refused == 2
    going_on = told(*refusal(95), rows=rows_until(97, refused=(95,)))
    assert (going_on.helped, going_on.outcome) == (None, "not known yet")


def test_refusals_without_an_event_of_their_own_are_counted_from_the_rows() -> None:
    story = told(*refusal(50), *refusal(58), rows=rows_until(120, refused=tuple(range(50, 90))))
    assert story.refused == 40


def test_the_decisive_line_comes_first_and_says_where() -> None:
    origin = {
        "kind": "softmax_masked",
        "operation": "softmax",
        "file": "model.py",
        "line": 13,
        "code": "a.softmax(-1)",
        "samples": [5],
        "dataset_samples": [205],
        "microbatch": 1,
        "num_microbatches": 4,
    }
    evidence = {"module": "block.0.attn", "kind": "Attention", "cause": Cause.ATTENTION_MASK, "origin": origin}
    located = Finding(**AT, detector=FindingKind.ORIGIN, detail="softmax over a masked row", evidence=evidence)
    ranked = Finding(**AT, detector=FindingKind.NONFINITE, detail="the loss is nan", evidence={"culprit_rank": 3})
    cause = Diagnosis(**AT, cause=Cause.ATTENTION_MASK, confidence=0.9, detail="Mask. the loss is nan")
    story = told(JUMP, ranked, cause, located)
    first = story.first_cause
    assert first is not None
    assert first.evidence[0] == "softmax over a masked row"
    assert dict(story.place.parts()) == {
        "module": "block.0.attn (Attention)",
        "operation": "softmax",
        "code": "model.py:13: a.softmax(-1)",
        "sample": "5",
        "in the data set": "205",
        "rank": "3",
        "micro-batch": "2",
    }


def test_a_cause_shown_by_a_trial_leads() -> None:
    guess = Diagnosis(**AT, cause=Cause.LABELS, confidence=0.6, detail="Labels. the loss is up")
    shown = Diagnosis(
        **AT, cause=Cause.OPTIMIZER_STATE, confidence=0.95, detail="State. by trial", evidence={"trial": {}}
    )
    story = told(JUMP, guess, shown)
    assert [cause.cause for cause in story.causes] == [Cause.OPTIMIZER_STATE, Cause.LABELS]
    assert story.causes[0].by_trial


def test_the_headline_says_what_the_incident_says() -> None:
    cause = Diagnosis(**AT, cause=Cause.LEARNING_RATE, confidence=0.9, detail="Lr. it is 1")
    stop = Decision(**AT, action=Action.STOP, reason="3 attempts did not help", cause=Cause.LEARNING_RATE)
    story = told(JUMP, cause, stop)
    assert story.level is IncidentLevel.STOPPED
    assert incident_sentence(story) == "Step 90: learning rate too high (90% sure); surefoot stopped the run."
    assert "stopped the run, because 3 attempts did not help" in incident_block(story)


# -- which events belong together


def grouped(*events: Event) -> list[EventGroup]:
    grouper = EventGrouper()
    for event in events:
        grouper.add(event.as_json())
    return grouper.groups


def at(attempt: int, kind: FindingKind = FindingKind.JUMP, severity: Severity = Severity.SUSPICIOUS) -> Finding:
    return Finding(step=attempt, attempt=attempt, detector=kind, detail="seen", severity=severity)


def test_an_incident_lasts_until_its_outcome_and_then_another_begins() -> None:
    rewind = Decision(step=12, attempt=12, action=Action.REWIND, reason="harm")
    helped = Outcome(step=60, attempt=80, action=Action.REWIND, helped=True)
    groups = grouped(at(10), rewind, at(70, FindingKind.GROWTH), helped, at(82))
    assert [len(group.events) for group in groups] == [4, 1]


def test_quiet_stretches_separate_incidents_and_one_that_did_not_help_goes_on() -> None:
    diagnosis = Diagnosis(step=16, attempt=16, cause=Cause.LABELS, confidence=0.5, evidence={"findings": ["jump"]})
    assert len(grouped(at(10), diagnosis, at(40))) == 2
    rewind = Decision(step=12, attempt=12, action=Action.REWIND, reason="harm")
    failed = Outcome(step=40, attempt=40, action=Action.REWIND, helped=False)
    again = Decision(step=40, attempt=40, action=Action.REWIND, reason="harm")
    assert len(grouped(at(10), rewind, failed, again)) == 1


def test_what_is_only_reported_stays_out_of_an_incident() -> None:
    slow = at(12, FindingKind.SLOW_STEPS, Severity.REPORT_ONLY)
    why = Diagnosis(
        step=12, attempt=12, cause=Cause.DATA_STARVATION, confidence=0.9, evidence={"findings": ["slow_steps"]}
    )
    groups = grouped(at(10), slow, why)
    assert [group.reported_only for group in groups] == [False, True]
    assert tell_incident(groups[1], RowFacts()).level is IncidentLevel.REPORTED


def test_a_second_diagnosis_is_another_incident() -> None:
    first = Diagnosis(step=16, attempt=16, cause=Cause.LABELS, confidence=0.5, evidence={"findings": ["jump"]})
    second = Diagnosis(step=30, attempt=30, cause=Cause.DRIFT, confidence=0.5, evidence={"findings": ["growth"]})
    groups = grouped(at(10), first, at(28, FindingKind.GROWTH), second)
    stories = [tell_incident(group, RowFacts()) for group in groups]
    assert [(story.attempt, story.causes[0].cause) for story in stories] == [(10, Cause.LABELS), (28, Cause.DRIFT)]


def test_a_damaged_event_is_told_as_far_as_it_goes() -> None:
    group = EventGroup()
    for event in (
        {"kind": "finding", "step": "?", "attempt": None, "detail": 7},
        {"kind": "diagnosis", "cause": "of another version", "confidence": "high", "evidence": 3, "advice": 5},
        {"kind": "trial", "values": {"branches": [{"branch": None, "probe_loss": "x"}, 3]}},
        {"kind": "note", "name": "tensors", "values": {"tensors": [1]}},
    ):
        group.add(event)
    story = tell_incident(group, RowFacts())
    assert story.first_cause is not None
    assert story.first_cause.cause is Cause.UNKNOWN
    assert math.isnan(story.trials[0].branches[0].probe_loss)
    assert incident_block(story)
