"""What the loop sets: rate, momentum, the loss scale and the clip threshold."""

from __future__ import annotations

import pytest
from made_rows import Bench, Source

from surefoot.judge.detectors.hyperparams import Clipping, HyperparamChange
from surefoot.judge.detectors.system import LossScale
from surefoot.judge.history import History
from surefoot.judge.thresholds import SETTLED_UPDATES, TREND_ROWS
from surefoot.records import Finding, Pattern, StepMetrics, Verdict


def begun(**values: float) -> tuple[Bench, HyperparamChange, Source]:
    bench, source = Bench(), Source(2)
    detector = HyperparamChange(bench.normal)
    assert bench.said(detector, source.rows(120, **values)) == []
    return bench, detector, source


def test_a_rate_that_was_raised_is_told_at_once_and_once() -> None:
    bench, detector, source = begun()
    at = source.attempt
    (found,) = bench.said(detector, source.rows(30, lr=4e-2))
    assert found.attempt == at
    assert found.evidence["times"] == pytest.approx(40)
    assert found.evidence["at_once"] == pytest.approx(40)
    assert not found.severe, "whether the run suffers from it is yet to be seen"
    assert bench.said(detector, [*source.rows(5, lr=6e-3), *source.rows(100)]) == []
    assert len(bench.said(detector, source.rows(5, lr=4e-2))) == 1


def test_what_schedules_do_is_no_news() -> None:
    bench, source = Bench(), Source(2)
    detector = HyperparamChange(bench.normal)
    warmup = [source.row(lr=1e-3 * k / 100) for k in range(1, 101)]
    decay = [source.row(lr=1e-3 * 0.98**k) for k in range(150)]
    steps = [source.row(lr=1e-4 * 0.1 ** (k // 40)) for k in range(80)]
    assert bench.said(detector, [*warmup, *decay, *steps]) == []
    bench, detector, source = begun()
    assert bench.said(detector, source.rows(50, lr=4e-3)) == [], "a warm restart"


@pytest.mark.parametrize("lr", [1e-5, 0.0])
def test_a_rate_that_is_as_good_as_off_is_told_once(lr: float) -> None:
    bench, detector, source = begun()
    (found,) = bench.said(detector, source.rows(50, lr=lr))
    assert found.evidence["before"] == 1e-3
    assert not found.severe
    assert bench.said(detector, source.rows(50)) == []
    assert len(bench.said(detector, source.rows(5, lr=lr))) == 1


def test_a_rate_that_was_too_high_from_the_start_is_grave() -> None:
    bench, source = Bench(), Source(2, loss=3.0, floor=3.0)
    (found,) = bench.said(HyperparamChange(bench.normal), [*source.rows(30, lr=0.1), *source.rows(10, lr=1e-3)])
    assert found.severe
    assert found.evidence["early"]


def test_a_momentum_that_never_forgets_is_told() -> None:
    bench, detector, source = begun()
    (found,) = bench.said(detector, source.rows(20, momentum=1.02))
    assert found.evidence == {"momentum": 1.02, "before": 0.9}
    assert "never forgets" in found.detail


@pytest.mark.parametrize(("now", "told"), [(0.95, 0), (0.99, 1), (0.5, 0)])
def test_a_momentum_is_measured_by_how_long_it_remembers(now: float, told: int) -> None:
    bench, detector, source = begun()
    assert len(bench.said(detector, source.rows(20, momentum=now))) == told


def scaled() -> tuple[Bench, LossScale, Source]:
    bench, source = Bench(), Source(2, loss_scale=65536.0)
    detector = LossScale(bench.sight)
    assert bench.said(detector, source.rows(2 * TREND_ROWS)) == []
    return bench, detector, source


def skipped(source: Source, count: int, scale: float) -> list[StepMetrics]:
    return [source.row(verdict=Verdict.OVERFLOW, loss_scale=scale * 0.5**k, nonfinite=4.0) for k in range(count)]


def test_a_few_overflows_are_how_loss_scaling_works() -> None:
    bench, detector, source = scaled()
    assert bench.said(detector, [*skipped(source, 3, 65536.0), *source.rows(50, loss_scale=8192.0)]) == []
    first = Source(3)
    assert bench.said(LossScale(bench.sight), skipped(first, 16, 2.0**32)) == [], "at the start it looks for its place"


def test_overflow_after_overflow_is_told_once() -> None:
    bench, detector, source = scaled()
    (found,) = bench.said(detector, skipped(source, 20, 65536.0))
    assert found.pattern is Pattern.OVERFLOW_SKIPS
    assert found.evidence["skipped"] == bench.sight.overflow_streak


def test_a_scale_that_collapsed_by_overflows_is_grave() -> None:
    bench, detector, source = scaled()
    first = [*skipped(source, 4, 2.0**16), *source.rows(3, loss_scale=2.0**12)]
    (found,) = bench.said(detector, [*first, *skipped(source, 4, 2.0**12), *source.rows(20, loss_scale=2.0**8)])
    assert found.severe
    assert found.pattern is Pattern.OVERFLOW_SKIPS


def test_a_scale_that_was_set_too_low_underflows() -> None:
    bench, detector, source = scaled()
    (found,) = bench.said(detector, source.rows(30, loss_scale=1.0))
    assert found.severe
    assert found.pattern is Pattern.NONE
    assert "small gradients become zero" in found.detail
    assert bench.said(detector, source.rows(30)) == []
    assert len(bench.said(detector, source.rows(30, loss_scale=1.0))) == 1


def clipping(source: Source, count: int, threshold: float) -> list[Finding]:
    """Rows as a run makes them that clips at this threshold."""
    bench, history = Bench(), History()
    detector = Clipping(bench.sight)
    found: list[Finding] = []
    for _ in range(count):
        row = source.row()
        factor = min(1.0, threshold / row.norm)
        told = {"clip": threshold, "clip_factor": factor, "clip_fraction": history.clip_fraction(factor)}
        found += detector.update(source.row(norm=row.norm, **told))
    return found


def test_a_threshold_that_clips_everything_is_told_once_with_a_better_one() -> None:
    (found,) = clipping(Source(1), 600, 0.3)
    assert found.evidence["share"] > 0.9
    assert 1.0 < found.evidence["top"] < 3.0
    assert "two to three times" in found.detail


def test_a_threshold_that_never_clips_is_told_once() -> None:
    (found,) = clipping(Source(1), SETTLED_UPDATES + 500, 1000.0)
    assert "protects from little" in found.detail


def test_a_threshold_that_clips_now_and_then_is_as_it_should_be() -> None:
    assert clipping(Source(1), SETTLED_UPDATES + 200, 1.4) == []
    assert clipping(Source(1), SETTLED_UPDATES + 200, 4.0) == [], "nor one that would clip a peak"
