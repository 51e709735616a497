"""Detectors of step time and memory: reported, never acted on."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from made_rows import Bench, Source, actions, judged, of, trained

from surefoot.judge.cause_catalog import CAUSES, MACHINE_CAUSES
from surefoot.judge.detectors.data import SlowSteps
from surefoot.judge.detectors.system import MemoryGrowth
from surefoot.judge.thresholds import BASELINE_ROWS, WINDOW_ROWS
from surefoot.records import Cause, Diagnosis, StepMetrics


def timed(source: Source, count: int, seconds: float = 0.2, wait: float = 0.01) -> list[StepMetrics]:
    """Steps of about this duration; some take far longer, as with a checkpoint."""
    rng = random.Random(count)
    lengths = [seconds * rng.uniform(0.9, 1.2) * (20 if k % 37 == 36 else 1) for k in range(count)]
    return [source.row(seconds=s, data_wait=wait * rng.uniform(0.5, 1.5)) for s in lengths]


def paced() -> tuple[Bench, SlowSteps, Source]:
    bench, source = Bench(), Source(0)
    detector = SlowSteps(bench.sight)
    slow_start = [source.row(seconds=30.0, data_wait=5.0) for _ in range(3)]
    assert bench.findings(detector, [*slow_start, *timed(source, 200)]) == []
    return bench, detector, source


def test_slow_steps_are_found_once_and_again_after_recovery() -> None:
    bench, detector, source = paced()
    at = source.attempt
    (finding,) = bench.findings(detector, timed(source, 60, seconds=1.0))
    assert finding.attempt == at + WINDOW_ROWS - 1
    assert finding.evidence["data"] is False
    assert bench.findings(detector, timed(source, 60)) == []
    assert len(bench.findings(detector, timed(source, 30, seconds=1.0))) == 1


def test_waiting_for_data_is_named_as_the_reason() -> None:
    bench, detector, source = paced()
    (finding,) = bench.findings(detector, timed(source, 30, seconds=0.5, wait=0.3))
    assert finding.evidence["data"] is True
    assert "waiting for data" in finding.detail


def filled(source: Source, readings: list[float]) -> list[StepMetrics]:
    """Each reading appears in three rows, because readings are taken every few seconds."""
    return [source.row(memory=reading) for reading in readings for _ in range(3)]


def test_steadily_growing_memory_is_found_once() -> None:
    bench, source = Bench(), Source(0)
    detector = MemoryGrowth(bench.sight)
    assert bench.findings(detector, filled(source, [1e9 * (1 + k / 10) for k in range(BASELINE_ROWS // 3)])) == [], (
        "warming up"
    )
    leaking = [3e9 * 1.01**k for k in range(4 * WINDOW_ROWS)]
    (finding,) = bench.findings(detector, filled(source, leaking))
    assert finding.evidence["grown"] > 1.05


def test_fluctuating_memory_is_no_leak() -> None:
    bench, source, rng = Bench(), Source(0), random.Random(3)
    detector = MemoryGrowth(bench.sight)
    assert bench.findings(detector, filled(source, [3e9 * rng.uniform(0.7, 1.3) for _ in range(300)])) == []
    sawtooth = [3e9 * (1 + 0.02 * (k % 8)) for k in range(200)]
    assert bench.findings(detector, filled(source, sawtooth)) == []


def test_judge_reports_slow_steps_and_leaks_without_acting() -> None:
    judge, source = trained()
    events = judged(judge, timed(source, 100))
    events += judged(judge, timed(source, 40, seconds=0.5, wait=0.3))
    events += judged(judge, filled(source, [3e9 * 1.01**k for k in range(40)]))
    named = [d.cause for d in of(Diagnosis, events)]
    assert named == [Cause.DATA_STARVATION, Cause.MEMORY_LEAK]
    assert actions(events) == []
    assert judge.quiet


def test_slow_steps_while_a_checkpoint_is_written_blame_the_disk() -> None:
    judge, source = trained()
    events = judged(judge, timed(source, 100))
    events += judged(judge, [replace(row, saving=1.0) for row in timed(source, 40, seconds=1.0)])
    (diagnosis,) = of(Diagnosis, events)
    assert diagnosis.cause is Cause.SLOW_SAVING
    assert "while a checkpoint is being written" in diagnosis.detail


def test_an_idle_device_that_does_not_wait_for_data_waits_for_launches() -> None:
    judge, source = trained()
    rows = [
        replace(row, utilisation=0.3, memory_reserved=1e9, time=1e6 + 60 * k)
        for k, row in enumerate(timed(source, 60, wait=0.001))
    ]
    (diagnosis,) = of(Diagnosis, judged(judge, rows))
    assert diagnosis.cause is Cause.LAUNCH_BOUND
    assert any("torch.compile" in text for text in diagnosis.advice)


@pytest.mark.parametrize("options", [{"seconds": 1.0}, {"seconds": 0.5, "wait": 0.3}])
def test_what_slows_a_run_down_is_never_answered_with_a_lower_learning_rate(options: dict[str, float]) -> None:
    judge, source = trained()
    events = judged(judge, [*timed(source, 100), *timed(source, 40, **options)])
    (diagnosis,) = of(Diagnosis, events)
    assert diagnosis.cause in MACHINE_CAUSES
    assert diagnosis.advice == CAUSES[diagnosis.cause].remedies
    assert not any("learning rate" in text for text in diagnosis.advice)
    assert "path" not in diagnosis.evidence
