"""Detectors of settings: lr, momentum, loss scale and clip threshold."""

from __future__ import annotations

import pytest
from made_rows import Bench, Source

from surefoot.judge.detectors.hyperparams import Clipping, HyperparamChange
from surefoot.judge.detectors.system import OVERFLOW_STREAK, LossScale
from surefoot.judge.history import History
from surefoot.judge.thresholds import SETTLED_UPDATES, TREND_ROWS
from surefoot.records import Finding, Pattern, StepMetrics, Verdict


def begun(**values: float) -> tuple[Bench, HyperparamChange, Source]:
    bench, source = Bench(), Source(2)
    detector = HyperparamChange(bench.normal)
    assert bench.findings(detector, source.rows(120, **values)) == []
    return bench, detector, source


def test_raised_lr_is_found_immediately_and_once() -> None:
    bench, detector, source = begun()
    at = source.attempt
    (finding,) = bench.findings(detector, source.rows(30, lr=4e-2))
    assert finding.attempt == at
    assert finding.evidence["times"] == pytest.approx(40)
    assert finding.evidence["at_once"] == pytest.approx(40)
    assert not finding.severe, "no harm has been seen yet"
    assert bench.findings(detector, [*source.rows(5, lr=6e-3), *source.rows(100)]) == []
    assert len(bench.findings(detector, source.rows(5, lr=4e-2))) == 1


def test_lr_schedules_give_no_finding() -> None:
    bench, source = Bench(), Source(2)
    detector = HyperparamChange(bench.normal)
    warmup = [source.row(lr=1e-3 * k / 100) for k in range(1, 101)]
    decay = [source.row(lr=1e-3 * 0.98**k) for k in range(150)]
    steps = [source.row(lr=1e-4 * 0.1 ** (k // 40)) for k in range(80)]
    assert bench.findings(detector, [*warmup, *decay, *steps]) == []
    bench, detector, source = begun()
    assert bench.findings(detector, source.rows(50, lr=4e-3)) == [], "a warm restart"


@pytest.mark.parametrize("lr", [1e-5, 0.0])
def test_lr_near_zero_is_found_once(lr: float) -> None:
    bench, detector, source = begun()
    (finding,) = bench.findings(detector, source.rows(50, lr=lr))
    assert finding.evidence["before"] == 1e-3
    assert not finding.severe
    assert bench.findings(detector, source.rows(50)) == []
    assert len(bench.findings(detector, source.rows(5, lr=lr))) == 1


def test_lr_too_high_from_the_start_is_severe() -> None:
    bench, source = Bench(), Source(2, loss=3.0, floor=3.0)
    (finding,) = bench.findings(HyperparamChange(bench.normal), [*source.rows(30, lr=0.1), *source.rows(10, lr=1e-3)])
    assert finding.severe
    assert finding.evidence["early"]


def test_momentum_above_one_is_found() -> None:
    bench, detector, source = begun()
    (finding,) = bench.findings(detector, source.rows(20, momentum=1.02))
    assert finding.evidence == {"momentum": 1.02, "before": 0.9}
    assert "never forgets" in finding.detail


@pytest.mark.parametrize(("now", "num_findings"), [(0.95, 0), (0.99, 1), (0.5, 0)])
def test_momentum_is_compared_by_its_averaging_length(now: float, num_findings: int) -> None:
    bench, detector, source = begun()
    assert len(bench.findings(detector, source.rows(20, momentum=now))) == num_findings


def scaled() -> tuple[Bench, LossScale, Source]:
    bench, source = Bench(), Source(2, loss_scale=65536.0)
    detector = LossScale(bench.sight)
    assert bench.findings(detector, source.rows(2 * TREND_ROWS)) == []
    return bench, detector, source


def skipped(source: Source, count: int, scale: float) -> list[StepMetrics]:
    return [source.row(verdict=Verdict.OVERFLOW, loss_scale=scale * 0.5**k, nonfinite=4.0) for k in range(count)]


def test_a_few_overflows_are_normal_loss_scaling() -> None:
    bench, detector, source = scaled()
    assert bench.findings(detector, [*skipped(source, 3, 65536.0), *source.rows(50, loss_scale=8192.0)]) == []
    first = Source(3)
    assert bench.findings(LossScale(bench.sight), skipped(first, 16, 2.0**32)) == [], (
        "GradScaler starts high and backs off"
    )


def test_consecutive_overflows_are_found_once() -> None:
    bench, detector, source = scaled()
    (finding,) = bench.findings(detector, skipped(source, 20, 65536.0))
    assert finding.pattern is Pattern.OVERFLOW_SKIPS
    assert finding.evidence["skipped"] == OVERFLOW_STREAK


def test_loss_scale_collapsed_by_overflows_is_severe() -> None:
    bench, detector, source = scaled()
    first = [*skipped(source, 4, 2.0**16), *source.rows(3, loss_scale=2.0**12)]
    (finding,) = bench.findings(detector, [*first, *skipped(source, 4, 2.0**12), *source.rows(20, loss_scale=2.0**8)])
    assert finding.severe
    assert finding.pattern is Pattern.OVERFLOW_SKIPS


def test_loss_scale_set_too_low_is_severe() -> None:
    bench, detector, source = scaled()
    (finding,) = bench.findings(detector, source.rows(30, loss_scale=1.0))
    assert finding.severe
    assert finding.pattern is Pattern.NONE
    assert "small gradients become zero" in finding.detail
    assert bench.findings(detector, source.rows(30)) == []
    assert len(bench.findings(detector, source.rows(30, loss_scale=1.0))) == 1


def clipping(source: Source, count: int, threshold: float) -> list[Finding]:
    """Findings in a run that clips at this threshold."""
    bench, history = Bench(), History()
    detector = Clipping(bench.sight)
    findings: list[Finding] = []
    for _ in range(count):
        row = source.row()
        factor = min(1.0, threshold / row.norm)
        clip_fields = {"clip": threshold, "clip_factor": factor, "clip_fraction": history.clip_fraction(factor)}
        findings += detector.update(source.row(norm=row.norm, **clip_fields))
    return findings


def test_threshold_that_clips_every_step_is_found_once_with_a_better_value() -> None:
    (finding,) = clipping(Source(1), 600, 0.3)
    assert finding.evidence["share"] > 0.9
    assert 1.0 < finding.evidence["top"] < 3.0
    assert "two to three times" in finding.detail


def test_threshold_that_never_clips_is_found_once() -> None:
    (finding,) = clipping(Source(1), SETTLED_UPDATES + 500, 1000.0)
    assert "protects from little" in finding.detail


def test_threshold_that_clips_occasionally_gives_no_finding() -> None:
    assert clipping(Source(1), SETTLED_UPDATES + 200, 1.4) == []
    assert clipping(Source(1), SETTLED_UPDATES + 200, 4.0) == [], "a threshold that would clip a spike"
