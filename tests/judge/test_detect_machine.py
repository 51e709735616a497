"""Time and memory: told, and never a reason to act."""

from __future__ import annotations

import random

from made_rows import Bench, Source, actions, judged, of, trained

from surefoot.judge.detectors.data import SlowSteps
from surefoot.judge.detectors.system import MemoryGrowth
from surefoot.judge.thresholds import BASELINE_ROWS, WINDOW_ROWS
from surefoot.records import Cause, Diagnosis, StepMetrics


def timed(source: Source, count: int, seconds: float = 0.2, wait: float = 0.01) -> list[StepMetrics]:
    """Steps of about this length; every so often one takes far longer, as with a checkpoint."""
    rng = random.Random(count)
    lengths = [seconds * rng.uniform(0.9, 1.2) * (20 if k % 37 == 36 else 1) for k in range(count)]
    return [source.row(seconds=s, data_wait=wait * rng.uniform(0.5, 1.5)) for s in lengths]


def paced() -> tuple[Bench, SlowSteps, Source]:
    bench, source = Bench(), Source(0)
    detector = SlowSteps(bench.sight)
    slow_start = [source.row(seconds=30.0, data_wait=5.0) for _ in range(3)]
    assert bench.said(detector, [*slow_start, *timed(source, 200)]) == []
    return bench, detector, source


def test_steps_that_take_far_longer_are_told_once_and_again_after_they_were_fast() -> None:
    bench, detector, source = paced()
    at = source.attempt
    (found,) = bench.said(detector, timed(source, 60, seconds=1.0))
    assert found.attempt == at + WINDOW_ROWS - 1
    assert found.evidence["data"] is False
    assert bench.said(detector, timed(source, 60)) == []
    assert len(bench.said(detector, timed(source, 30, seconds=1.0))) == 1


def test_waiting_for_data_is_told_as_the_reason() -> None:
    bench, detector, source = paced()
    (found,) = bench.said(detector, timed(source, 30, seconds=0.5, wait=0.3))
    assert found.evidence["data"] is True
    assert "waiting for data" in found.detail


def filled(source: Source, readings: list[float]) -> list[StepMetrics]:
    """Each reading is told by some rows, as they are taken every few seconds."""
    return [source.row(memory=reading) for reading in readings for _ in range(3)]


def test_memory_that_grows_without_a_pause_is_told_once() -> None:
    bench, source = Bench(), Source(0)
    detector = MemoryGrowth(bench.sight)
    assert bench.said(detector, filled(source, [1e9 * (1 + k / 10) for k in range(BASELINE_ROWS // 3)])) == [], (
        "warming up"
    )
    leaking = [3e9 * 1.01**k for k in range(4 * WINDOW_ROWS)]
    (found,) = bench.said(detector, filled(source, leaking))
    assert found.evidence["grown"] > 1.05


def test_memory_that_comes_and_goes_is_no_leak() -> None:
    bench, source, rng = Bench(), Source(0), random.Random(3)
    detector = MemoryGrowth(bench.sight)
    assert bench.said(detector, filled(source, [3e9 * rng.uniform(0.7, 1.3) for _ in range(300)])) == []
    sawtooth = [3e9 * (1 + 0.02 * (k % 8)) for k in range(200)]
    assert bench.said(detector, filled(source, sawtooth)) == []


def test_the_judge_names_them_and_touches_nothing() -> None:
    judge, source = trained()
    events = judged(judge, timed(source, 100))
    events += judged(judge, timed(source, 40, seconds=0.5, wait=0.3))
    events += judged(judge, filled(source, [3e9 * 1.01**k for k in range(40)]))
    named = [d.cause for d in of(Diagnosis, events)]
    assert named == [Cause.DATA_STARVATION, Cause.MEMORY_LEAK]
    assert actions(events) == []
    assert judge.quiet
