"""Healthy runs of every kind have no decisions, and a published loss spike is found early."""

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
def test_healthy_run_has_no_decisions(
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
    """Any loss level and slope, any batch noise, and a schedule with restarts."""
    source = Source(seed, loss=loss, floor=floor * loss, half=half, noise=noise, norm=norm, scatter=scatter)
    trace_rows = [source.row(lr=1e-3 * raises ** (1 - (k % restart) / restart)) for k in range(300)]
    assert of(Decision, judged(Judge(Policy()), trace_rows)) == []


def test_most_detectors_are_not_called_on_healthy_rows() -> None:
    judge, source = Judge(Policy()), Source(3)
    detectors_called: list[str] = []

    def recording(detector: Detector) -> Callable[..., Findings]:
        update = detector.update

        def update_and_record(row: StepMetrics, tensors: np.ndarray | None = None) -> Findings:
            detectors_called.append(detector.kind)
            return update(row, tensors)

        return update_and_record

    for row in source.rows(100):
        judge.update(row, layers(row.attempt))
    for detector in judge.detectors.all:
        detector.update = recording(detector)
    for row in source.rows(100):
        judge.update(row, layers(row.attempt))
    assert len(detectors_called) < 100 * len(judge.detectors.all) / 4
    judge.update(source.row(times=9.0, lr=0.1), layers(0))
    assert {FindingKind.JUMP, FindingKind.HYPERPARAM_CHANGE, FindingKind.LOSS_RESCALED} <= set(detectors_called)


def first_finding(given_rows: list[StepMetrics]) -> int:
    judge = Judge(Policy())
    return next(row.attempt for row in with_gate_verdicts(given_rows) if of(Finding, judge.update(row)))


def test_spike_of_a_published_run_is_found_two_steps_early() -> None:
    (trace,) = [t for t in PUBLISHED_RUNS if t.name == "bigscience_176b"]
    first = first_finding(rows(trace))
    assert PRELUDE_STEPS <= first <= PRELUDE_STEPS + trace.spike - 2


def test_published_healthy_runs_have_no_decisions() -> None:
    for trace in PUBLISHED_RUNS:
        if trace.healthy:
            trace_rows = with_gate_verdicts(rows(trace)) if trace.has_norms else rows(trace)
            assert of(Decision, judged(Judge(Policy()), trace_rows)) == [], trace.name
