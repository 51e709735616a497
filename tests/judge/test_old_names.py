"""Every old name in journal/aliases.py maps to a current name."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest

from surefoot.journal.aliases import (
    DETECTOR_STATE,
    DETECTORS,
    INCIDENT,
    INCIDENT_STEP,
    REMEDIES,
    upgraded_event,
    upgraded_incident,
)
from surefoot.journal.policy_aliases import (
    DERIVED_POLICY,
    DERIVED_THRESHOLDS,
    POLICY,
    THRESHOLDS,
    derived_figures,
    upgraded_policy,
)
from surefoot.judge import remedies
from surefoot.judge.detectors.base import Detector
from surefoot.judge.incident import Incident, IncidentStep, Stage
from surefoot.judge.judge import Judge
from surefoot.judge.policy import Policy
from surefoot.judge.thresholds import Thresholds

MOVED_STATE = {"_lr", "_max_lr", "_losses", "_applied_attempt"}
"""State that the signals keep now, for all detectors."""
BY_NAME = {detector.kind.value: detector for detector in Judge(Policy()).detectors.all}


@pytest.mark.parametrize("detector", BY_NAME.values(), ids=lambda detector: detector.kind)
def test_detector_is_named_after_its_class(detector: Detector) -> None:
    assert re.sub(r"(?<!^)(?=[A-Z])", "_", type(detector).__name__).lower() == detector.kind


def test_old_detector_names() -> None:
    assert set(DETECTORS.values()) <= {*BY_NAME, "norm_outlier"}
    assert not DETECTORS.keys() & BY_NAME.keys()
    assert upgraded_event({"kind": "finding", "detector": "astray"})["detector"] == "eval_regression"
    old = {"kind": "diagnosis", "evidence": {"findings": ["level", "jump"]}}
    assert upgraded_event(old)["evidence"]["findings"] == ["loss_level", "jump"]


@pytest.mark.parametrize("name", DETECTOR_STATE)
def test_old_detector_state(name: str) -> None:
    detector = BY_NAME[name]
    assert set(DETECTOR_STATE[name].values()) <= set(detector.state_names) | MOVED_STATE
    assert not DETECTOR_STATE[name].keys() & set(detector.state_names)


def test_old_thresholds() -> None:
    names = {field.name for field in fields(Thresholds)}
    assert set(THRESHOLDS.values()) == (names | DERIVED_THRESHOLDS.keys()) - {"idle_seconds", "false_alarms"}
    assert set(POLICY.values()) - DERIVED_POLICY.keys() <= {field.name for field in fields(Policy)}
    assert upgraded_policy({"sight": {"jump": 9.0}}) == {"thresholds": {"norm_jump_ratio": 9.0}}


def test_figures_that_can_no_longer_be_set_are_read_and_named() -> None:
    held = {"hold": 90, "limit": 9, "sight": {"raised": 5.0, "explodes": 50.0}}
    assert upgraded_policy(held) == {"max_consecutive_vetoes": 9, "thresholds": {"exploding_norm": 50.0}}
    figures = derived_figures(held)
    assert figures.keys() == {"max_vetoes_waiting", "thresholds.level_sigmas"}
    assert "it follows from false_alarms" in figures["thresholds.level_sigmas"][2]
    old: dict[str, Any] = {"level_sigmas": 5.0, "exploding_norm": 50.0}
    with pytest.warns(FutureWarning, match="level_sigmas=5.0.* false_alarms"):
        assert Thresholds(**old) == Thresholds(exploding_norm=50.0)
    with pytest.raises(TypeError, match="levle_sigmas"):
        Thresholds(levle_sigmas=5.0)


def test_old_incidents() -> None:
    flags = {"diagnosed", "acted_on"}  # now one field, stage
    assert set(INCIDENT.values()) <= {field.name for field in fields(Incident)} | flags
    assert upgraded_incident({"named": True, "treated": False})["stage"] == Stage.DIAGNOSED
    assert upgraded_incident({"named": True, "treated": True})["stage"] == Stage.ACTED_ON
    assert set(INCIDENT_STEP.values()) <= {field.name for field in fields(IncidentStep)}


def test_old_remedies() -> None:
    assert {remedy.id for remedy in remedies.ALL_REMEDIES} == set(remedies.RemedyId)
    texts = {remedy.text for remedy in remedies.ALL_REMEDIES}
    assert set(REMEDIES.values()) <= texts
    assert not REMEDIES.keys() & texts
    old = "with half the rate, warmed up again"
    assert remedies.remedy_id(old) is remedies.remedy_id(REMEDIES[old]) is remedies.remedy_id("lower_lr")
