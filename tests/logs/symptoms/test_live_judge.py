"""Diagnosis of a surefoot run: causes recorded during the run are ranked before those found in its log."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import surefoot
from surefoot.cli import app
from surefoot.journal import Journal
from surefoot.logs.diagnose_log import diagnose
from surefoot.logs.log_diagnosis import LogDiagnosis, RunHealth
from surefoot.records import Action, Cause, Decision, Diagnosis, Event, Finding, StepMetrics

FALL = [2.0 + 6.0 * 0.97**step + 0.02 * (step % 3) for step in range(200)]
JUMP = [*FALL[:150], *(30.0 + step % 5 for step in range(50))]
LABELS = Diagnosis(
    step=152,
    attempt=152,
    cause=Cause.LABELS,
    confidence=0.62,
    detail="Labels do not belong to their inputs. the weights are what they were, and so are the inputs",
    evidence={"findings": ["level"]},
    advice=("Check the labels by hand.",),
)
LEVEL = Finding(step=152, attempt=152, detector="level", detail="the loss has risen from 2.1 to 31 and stays there")
WEIGHTS = Diagnosis(step=152, attempt=152, cause=Cause.WEIGHTS_DAMAGED, confidence=0.5, detail="Weights. others")


def diagnose_run(folder: Path, losses: Sequence[float], *events: Event) -> LogDiagnosis:
    """Diagnose a run with these losses and events."""
    journal = Journal(folder, info={}, on_failure=pytest.fail)
    for step, loss in enumerate(losses):
        journal.row(StepMetrics(step=step, attempt=step, time=1e9 + step, loss=loss, norm=1.0, lr=0.1))
    for event in events:
        journal.event(event)
    journal.close()
    return diagnose(folder)


def test_recorded_causes_are_ranked_first_with_their_evidence(tmp_path: Path) -> None:
    diagnosis = diagnose_run(tmp_path / "run", JUMP, LEVEL, WEIGHTS, LABELS)
    assert diagnosis.verdict is RunHealth.FAILED
    assert [cause.cause for cause in diagnosis.causes[:2]] == [Cause.LABELS, Cause.WEIGHTS_DAMAGED]
    first = diagnosis.causes[0]
    assert first.confidence == 0.62
    assert first.evidence[0] == "the weights are what they were, and so are the inputs"
    assert first.evidence[1] == "step 152: the loss has risen from 2.1 to 31 and stays there"
    assert any("was down to" in line for line in first.evidence[2:])  # what the log adds
    assert first.advice[0] == "Check the labels by hand."
    assert all(cause.confidence <= 0.5 for cause in diagnosis.causes[2:])


def test_incident_at_the_onset_is_ranked_first(tmp_path: Path) -> None:
    early = Diagnosis(step=60, attempt=60, cause=Cause.BAD_BATCH, confidence=0.9, detail="A batch. one stood out")
    late = Diagnosis(step=195, attempt=195, cause=Cause.OVERFITTING, confidence=0.9, detail="By heart. it repeats")
    diagnosis = diagnose_run(tmp_path / "run", JUMP, early, LEVEL, LABELS, late)
    assert diagnosis.causes[0].cause is Cause.LABELS


def test_stopped_run_names_the_cause_of_the_stop(tmp_path: Path) -> None:
    earlier = Diagnosis(step=151, attempt=151, cause=Cause.BAD_BATCH, confidence=0.4, detail="A batch. one of them")
    stop = Decision(step=152, attempt=152, action=Action.STOP, cause=Cause.LABELS, reason="3 attempts did not help")
    assert diagnose_run(tmp_path / "run", JUMP, earlier, LEVEL, LABELS, stop).causes[0].cause is Cause.LABELS


def test_run_with_an_intervention_is_a_warning(tmp_path: Path) -> None:
    rewind = Decision(step=152, attempt=152, action=Action.REWIND, cause=Cause.LABELS, reason="the loss has risen")
    diagnosis = diagnose_run(tmp_path / "run", FALL, LEVEL, LABELS, rewind)
    assert diagnosis.verdict is RunHealth.WARNING
    assert diagnosis.sentence.startswith("Step 152: wrong labels (62% sure); surefoot decided to go back")
    assert diagnosis.onset_step == 152
    assert diagnosis.causes[0].cause is Cause.LABELS


def test_incident_without_an_intervention_is_mentioned_in_a_healthy_run(tmp_path: Path) -> None:
    watched = Decision(step=152, attempt=152, action=Action.REWIND, applied=False, reason="it only observes")
    diagnosis = diagnose_run(tmp_path / "run", FALL, LEVEL, LABELS, watched)
    assert diagnosis.verdict is RunHealth.HEALTHY
    assert "labels at step 152" in diagnosis.sentence
    assert "nothing stands out" not in diagnosis.sentence


def test_unrelated_recorded_cause_does_not_replace_the_diagnosed_one(tmp_path: Path) -> None:
    passing = Diagnosis(step=60, attempt=60, cause=Cause.BAD_BATCH, confidence=0.65, detail="A batch. one stood out")
    diagnosis = diagnose_run(tmp_path / "run", [2.3 + 0.001 * (step % 3) for step in range(200)], passing)
    assert diagnosis.causes[0].cause is Cause.LABELS  # a plateau at the logarithm of ten
    unknown = Diagnosis(
        step=152, attempt=152, cause=Cause.UNKNOWN, confidence=0.9, detail="The numbers do not say why."
    )
    assert diagnose_run(tmp_path / "other", JUMP, unknown).causes[0].cause is not Cause.UNKNOWN


def test_page_shows_the_deciding_evidence(tmp_path: Path) -> None:
    more = [
        Finding(step=150, attempt=150, detector=name, detail=f"seen by {name}") for name in ("jump", "norms", "inputs")
    ]
    labels = {"findings": ["level", "jump", "norms", "inputs"]}
    diagnosis = Diagnosis(step=152, attempt=152, cause=Cause.LABELS, confidence=0.6, detail="L. why", evidence=labels)
    diagnose_run(tmp_path / "run", JUMP, *more, LEVEL, diagnosis)
    printed = CliRunner().invoke(app, ["diagnose", str(tmp_path / "run")]).stdout
    for words in ("Wrong labels (60 %)", "Why\n", "seen by jump", "seen by norms", "seen by inputs", "risen from 2.1"):
        assert words in printed


@pytest.mark.parametrize("policy", ["protect", "observe"])
def test_real_run_and_its_diagnosis_name_the_same_cause(tmp_path: Path, policy: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with surefoot.attach(model, optimizer, run_dir=tmp_path / "run", policy=policy) as guard:
        for step in range(80):
            x = torch.randn(8, 4)
            if step == 60:
                x[3] = float("nan")
            loss = guard.watch((model(x) - x.sum(1, keepdim=True)).square().mean(), x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    named = [event for event in surefoot.read(tmp_path / "run").events if event["kind"] == "diagnosis"]
    first = [event for event in named if event["attempt"] == named[0]["attempt"]]
    surest = max(first, key=lambda event: event["confidence"])
    diagnosis = surefoot.diagnose(tmp_path / "run")
    assert diagnosis.causes[0].cause == surest["cause"] == Cause.BAD_BATCH
    assert diagnosis.causes[0].confidence == surest["confidence"]
