"""A detector is added with its class and one line in the table: what it finds is judged, reported and saved."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from made_rows import Source

from surefoot.judge import detectors
from surefoot.judge.detectors import Detectors, ModelFacts
from surefoot.judge.detectors.base import NOTHING, Detector, Findings
from surefoot.judge.judge import Judge
from surefoot.judge.policy import Policy
from surefoot.judge.signals import Sign, Signals
from surefoot.judge.thresholds import Thresholds
from surefoot.records import Diagnosis, Finding, FindingKind, Severity, StepMetrics


class SevenTokens(Detector):
    """Reports the first batch of exactly 7 tokens."""

    kind: ClassVar = FindingKind.named("seven_tokens")
    wakes_on: ClassVar = Sign.FIRST
    severity: ClassVar = Severity.REPORT_ONLY
    state_names: ClassVar = ("_reported",)

    def __init__(self, wanted: float = 7.0) -> None:
        self._wanted = wanted
        self._reported = False

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> Findings:
        if self._reported or row.tokens != self._wanted:
            return NOTHING
        self._reported = True
        return self.report(row, "the batch has 7 tokens", {"tokens": row.tokens})


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Judge:
    monkeypatch.setattr(detectors, "DETECTORS", (*detectors.DETECTORS, lambda made: SevenTokens()))
    return Judge(Policy())


def test_an_added_detector_reports_through_the_judge(judge: Judge) -> None:
    source = Source(1)
    events = [event for row in source.rows(30) for event in judge.update(row)]
    assert not [event for event in events if isinstance(event, Finding)]
    (finding, diagnosis) = judge.update(source.row(tokens=7.0))[:2]
    assert isinstance(finding, Finding)
    assert isinstance(diagnosis, Diagnosis), "what is only reported gets its cause at once"
    assert (finding.detector, finding.severity, finding.detail) == (
        "seven_tokens",
        Severity.REPORT_ONLY,
        "the batch has 7 tokens",
    )
    assert finding.as_json()["detector"] == "seven_tokens"
    assert judge.quiet, "a finding that is only reported opens no incident"
    assert judge.update(source.row(tokens=7.0)) == []


def test_the_state_of_an_added_detector_is_saved_by_its_name(judge: Judge) -> None:
    source = Source(1)
    judge.update(source.row(tokens=7.0))
    state = judge.state_dict()
    assert state["detectors"]["seven_tokens"] == {"_reported": True}
    restored = Judge(Policy())
    restored.load_state_dict(state)
    assert restored.update(source.row(tokens=7.0)) == []


def test_an_added_detector_can_open_an_incident(judge: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SevenTokens, "severity", Severity.SUSPICIOUS)
    source = Source(1)
    for row in source.rows(30):
        judge.update(row)
    judge.update(source.row(tokens=7.0))
    assert not judge.quiet
    state = judge.state_dict()
    restored = Judge(Policy())
    restored.load_state_dict(state)
    assert not restored.quiet, "an incident with its findings is part of the state"


def test_named_kinds() -> None:
    kind = FindingKind.named("seven_tokens")
    assert kind is FindingKind.named("seven_tokens") is FindingKind("seven_tokens")
    assert kind not in list(FindingKind)
    assert (kind, repr(kind)) == ("seven_tokens", "<FindingKind.SEVEN_TOKENS: 'seven_tokens'>")
    assert FindingKind.named("jump") is FindingKind.JUMP
    with pytest.raises(ValueError, match="no_such_detector"):
        FindingKind("no_such_detector")


def test_each_detector_is_listed_once() -> None:
    kinds = [detector.kind for detector in Detectors(Signals(Thresholds()), ModelFacts()).all]
    assert len(set(kinds)) == len(kinds) == len(detectors.DETECTORS)
