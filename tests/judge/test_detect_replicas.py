"""Comparison of ranks that should have equal weights: when a difference is reported, and when it is severe."""

from __future__ import annotations

import math

from surefoot.judge.detectors.weights import Replicas
from surefoot.records import Finding, StepMetrics


def findings_of(detector: Replicas, attempt: int, replicas: float, rank: int = -1) -> list[Finding]:
    return detector.update(StepMetrics(step=attempt, attempt=attempt, time=0.0, replicas=replicas, rank=rank))


def known_equal() -> Replicas:
    detector = Replicas()
    for attempt in (1, 9, 17):
        assert not findings_of(detector, attempt, 0)
    return detector


def test_difference_after_equal_comparisons_is_severe_and_names_the_rank() -> None:
    (finding,) = findings_of(known_equal(), 101, 1, rank=2)
    assert finding.severe
    assert "rank 2" in finding.detail
    assert finding.evidence["well"] == 17


def test_difference_from_the_start_is_reported_once_and_never_severe() -> None:
    detector = Replicas()
    (finding,) = findings_of(detector, 1, 1)
    assert not finding.severe
    assert "taken as intended" in finding.detail
    assert not any(findings_of(detector, attempt, replicas) for attempt, replicas in ((9, 1), (17, 0), (101, 1)))


def test_unsynchronized_gradients_explain_a_difference() -> None:
    (finding,) = findings_of(known_equal(), 101, math.inf)
    assert not finding.severe


def test_replicas_are_equal_again_after_a_rewind() -> None:
    detector = known_equal()
    findings_of(detector, 101, 1)
    detector.rewound_to(16)
    (finding,) = findings_of(detector, 104, 0)
    assert "the same weights again" in finding.detail
    (finding,) = findings_of(detector, 201, 1)
    assert finding.severe, "a later fault is severe again"


def test_difference_that_persists_after_a_rewind_is_reported() -> None:
    detector = known_equal()
    findings_of(detector, 101, 1)
    detector.rewound_to(90)
    (finding,) = findings_of(detector, 104, 1)
    assert finding.severe


def test_unfixable_difference_is_reported_once_with_advice() -> None:
    detector = known_equal()
    findings_of(detector, 101, 1)
    detector.restore_failed("no states are kept")
    (finding,) = findings_of(detector, 103, math.nan)
    assert not finding.severe
    assert "no states are kept" in finding.detail
    assert "checkpoint saved before attempt 17" in finding.detail
    assert not findings_of(detector, 201, 1)
