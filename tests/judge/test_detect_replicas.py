"""Ranks that should hold the same weights: what is told of them, and when it calls for an action."""

from __future__ import annotations

import math

from surefoot.judge.detectors.weights import Replicas
from surefoot.records import Finding, StepMetrics


def told(detector: Replicas, attempt: int, replicas: float, rank: int = -1) -> list[Finding]:
    return detector.update(StepMetrics(step=attempt, attempt=attempt, time=0.0, replicas=replicas, rank=rank))


def known_equal() -> Replicas:
    detector = Replicas()
    for attempt in (1, 9, 17):
        assert not told(detector, attempt, 0)
    return detector


def test_a_difference_after_several_equal_comparisons_calls_for_an_action_and_names_the_rank() -> None:
    (finding,) = told(known_equal(), 101, 1, rank=2)
    assert finding.severe
    assert "rank 2" in finding.detail
    assert finding.evidence["well"] == 17


def test_a_difference_from_the_start_is_told_once_and_never_acted_on() -> None:
    detector = Replicas()
    (finding,) = told(detector, 1, 1)
    assert not finding.severe
    assert "taken as intended" in finding.detail
    assert not any(told(detector, attempt, replicas) for attempt, replicas in ((9, 1), (17, 0), (101, 1)))


def test_gradients_of_their_own_explain_a_difference() -> None:
    (finding,) = told(known_equal(), 101, math.inf)
    assert not finding.severe


def test_equal_again_after_the_way_back() -> None:
    detector = known_equal()
    told(detector, 101, 1)
    detector.rewound_to(16)
    (finding,) = told(detector, 104, 0)
    assert "the same weights again" in finding.detail
    (finding,) = told(detector, 201, 1)
    assert finding.severe, "another fault is mended, too"


def test_a_way_back_to_later_weights_has_not_mended_it() -> None:
    detector = known_equal()
    told(detector, 101, 1)
    detector.rewound_to(90)
    (finding,) = told(detector, 104, 1)
    assert finding.severe


def test_what_cannot_be_mended_is_told_with_a_way_out_and_no_more() -> None:
    detector = known_equal()
    told(detector, 101, 1)
    detector.restore_failed("no states are kept")
    (finding,) = told(detector, 103, math.nan)
    assert not finding.severe
    assert "no states are kept" in finding.detail
    assert "checkpoint saved before attempt 17" in finding.detail
    assert not told(detector, 201, 1)
