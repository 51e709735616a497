"""Healthy runs of every kind are left alone, and the best-known public trouble is seen before it is there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from made_rows import Source, judged, layers, of

from benchmarks.zoo.published_runs import PRELUDE_STEPS, PUBLISHED_RUNS, rows
from benchmarks.zoo.scoreboard.scores import with_gate_verdicts
from surefoot.judge.detectors.base import Detector, Findings
from surefoot.judge.judge import Judge
from surefoot.judge.policy import Policy
from surefoot.records import Decision, Finding, FindingKind, StepMetrics


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    loss=st.floats(-3, 3).map(lambda power: 10.0**power),
    floor=st.floats(0.0, 1.0),
    half=st.floats(20, 1000),
    noise=st.floats(0.0, 0.35),
    scatter=st.floats(0.02, 0.7),
    norm=st.floats(-4, 1).map(lambda power: 10.0**power),
    restart=st.integers(40, 300),
    raises=st.floats(1.0, 4.0),
)
def test_a_healthy_run_is_left_alone(
    seed: int,
    loss: float,
    floor: float,
    half: float,
    noise: float,
    scatter: float,
    norm: float,
    restart: int,
    raises: float,
) -> None:
    """Any level and slope, batches of any noise, and a schedule that restarts."""
    source = Source(seed, loss=loss, floor=floor * loss, half=half, noise=noise, norm=norm, scatter=scatter)
    told = [source.row(lr=1e-3 * raises ** (1 - (k % restart) / restart)) for k in range(300)]
    assert of(Decision, judged(Judge(Policy()), told)) == []


def test_most_detectors_sleep_through_a_healthy_row() -> None:
    judge, source = Judge(Policy()), Source(3)
    asked: list[str] = []

    def listening(detector: Detector) -> Callable[..., Findings]:
        update = detector.update

        def update_and_note(row: StepMetrics, tensors: np.ndarray | None = None) -> Findings:
            asked.append(detector.kind)
            return update(row, tensors)

        return update_and_note

    for row in source.rows(100):
        judge.update(row, layers(row.attempt))
    for detector in judge.detectors.all:
        detector.update = listening(detector)
    for row in source.rows(100):
        judge.update(row, layers(row.attempt))
    assert len(asked) < 100 * len(judge.detectors.all) / 4
    judge.update(source.row(times=9.0, lr=0.1), layers(0))
    assert {FindingKind.JUMP, FindingKind.HYPERPARAM_CHANGE, FindingKind.LOSS_RESCALED} <= set(asked)


def first_sign(given_rows: list[StepMetrics]) -> int:
    judge = Judge(Policy())
    return next(row.attempt for row in with_gate_verdicts(given_rows) if of(Finding, judge.update(row)))


def test_the_spike_of_a_public_run_is_seen_two_steps_before() -> None:
    (trace,) = [t for t in PUBLISHED_RUNS if t.name == "bigscience_176b"]
    first = first_sign(rows(trace))
    assert PRELUDE_STEPS <= first <= PRELUDE_STEPS + trace.spike - 2


def test_public_runs_that_only_look_like_trouble_are_left_alone() -> None:
    for trace in PUBLISHED_RUNS:
        if trace.healthy:
            told = with_gate_verdicts(rows(trace)) if trace.has_norms else rows(trace)
            assert of(Decision, judged(Judge(Policy()), told)) == [], trace.name
