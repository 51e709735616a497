"""Detectors of loss and norm curves: jumps, raised levels, growth, oscillation, plateaus; noise is ignored."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from made_rows import Bench, Source, layers

from surefoot.judge.detectors.base import Detector
from surefoot.judge.detectors.data import RepeatedBatches
from surefoot.judge.detectors.gradients import LargeInitialGrads, LossRescaled
from surefoot.judge.detectors.loss import GROWTH_STEPS, Growth, Jump, LossLevel, Oscillation, PeriodicSpikes, Plateau
from surefoot.judge.thresholds import EARLY_UPDATES, RECENT_ROWS, REPEAT_COUNT
from surefoot.records import LAYER_STATS, Pattern, StepMetrics

MAKE: dict[str, Callable[[Bench], Detector]] = {
    "jump": lambda bench: Jump(bench.normal),
    "loss_level": lambda bench: LossLevel(bench.normal, LossRescaled(bench.normal)),
    "growth": lambda bench: Growth(bench.normal),
    "oscillation": lambda bench: Oscillation(bench.normal),
    "plateau": lambda bench: Plateau(bench.normal),
    "repeated_batches": lambda bench: RepeatedBatches(bench.sight),
    "periodic_spikes": lambda bench: PeriodicSpikes(bench.normal),
    "large_initial_grads": lambda bench: LargeInitialGrads(bench.sight),
    "loss_rescaled": lambda bench: LossRescaled(bench.normal),
}


@pytest.mark.parametrize("name", MAKE)
@pytest.mark.parametrize(("seed", "noise"), [(0, 0.0), (1, 0.03), (2, 0.1), (3, 0.2)])
def test_ordinary_noise_gives_no_finding(name: str, seed: int, noise: float) -> None:
    bench = Bench()
    detector = MAKE[name](bench)
    tensors = (layers(10_000 * seed + k) for k in range(400))
    assert bench.findings(detector, Source(seed, noise=noise).rows(400), tensors) == []


def begun(name: str, rows: int = 150, seed: int = 1) -> tuple[Bench, Detector, Source]:
    """A detector that has seen a healthy run."""
    bench, source = Bench(), Source(seed)
    detector = MAKE[name](bench)
    assert bench.findings(detector, source.rows(rows), (layers(k) for k in range(rows))) == []
    return bench, detector, source


@pytest.mark.parametrize("change", [{"times": 5.0}, {"swells": 30.0}])
def test_jump_is_found_at_its_first_step(change: dict[str, float]) -> None:
    bench, detector, source = begun("jump")
    at = source.attempt
    findings = bench.findings(detector, [*source.rows(2, **change), *source.rows(20)])
    assert [(f.attempt, f.pattern) for f in findings] == [(at, Pattern.JUMP)]
    assert not findings[0].severe, "a single jump may be chance"


def test_second_norm_jump_soon_after_is_severe() -> None:
    bench, detector, source = begun("jump")
    jump = [source.row(swells=40.0), *source.rows(REPEAT_COUNT + 5)]
    again = [source.row(swells=40.0), *source.rows(REPEAT_COUNT + 5)]
    late = [*source.rows(100), source.row(swells=40.0)]
    assert [f.severe for f in bench.findings(detector, [*jump, *again, *late])] == [False, True, False]


def test_raised_level_is_found_once_and_again_after_recovery() -> None:
    bench, detector, source = begun("loss_level")
    (first,) = bench.findings(detector, source.rows(40, times=1.5))
    assert first.attempt - 150 < 10
    assert first.evidence["level"] == pytest.approx(1.5 * first.evidence["normal"], rel=0.15)
    assert not first.severe
    assert bench.findings(detector, source.rows(150)) == []
    assert len(bench.findings(detector, source.rows(40, times=1.8))) == 1


def test_slowly_rising_level_is_found() -> None:
    bench, detector, source = begun("loss_level")
    findings = bench.findings(detector, [source.row(times=1 + 0.008 * k) for k in range(60)])
    assert len(findings) == 1


@pytest.mark.parametrize(("level", "severe"), [(9.0, False), (20.0, True)])
def test_level_close_to_earlier_maxima_is_not_severe(level: float, severe: bool) -> None:
    """Early in a run with heavy-tailed losses, several high ones may follow each other by chance."""
    bench, source = Bench(), Source(0, loss=1.0, floor=1.0)
    tail = [source.row(loss=6.0) if k % 7 == 3 else source.row() for k in range(30)]
    findings = bench.findings(MAKE["loss_level"](bench), [*tail, *source.rows(6, loss=level)])
    assert any(f.severe for f in findings) is severe


@pytest.mark.parametrize(("second_last", "severe"), [(1.0, False), (12.0, True)])
def test_one_normal_loss_in_five_prevents_a_severe_finding(second_last: float, severe: bool) -> None:
    """Four high losses of five may be a heavy tail; after lost progress all of them are high."""
    bench, source = Bench(), Source(0, loss=1.0, floor=1.0)
    rows = [
        *source.rows(60),
        *(source.row(loss=loss) for loss in (20.0, 8.0, second_last, 15.0, 12.0)),
        *source.rows(6),
    ]
    findings = bench.findings(MAKE["loss_level"](bench), rows)
    assert any(f.severe for f in findings) is severe


def test_loss_far_above_its_start_is_severe() -> None:
    bench, detector, source = begun("loss_level")
    findings = bench.findings(detector, source.rows(10, times=6.0))
    assert [f.severe for f in findings][-1]
    assert findings[-1].evidence["of_start"] > 2
    assert "times its start value" in findings[-1].detail


@pytest.mark.parametrize("what", ["times", "swells"])
def test_exponential_growth_is_found_once(what: str) -> None:
    bench, detector, source = begun("growth")
    source_quiet = Source(1, noise=0.005, scatter=0.02)
    source_quiet.attempt, source_quiet.step = source.attempt, source.step
    findings = bench.findings(detector, [source_quiet.row(**{what: 1.3**k}) for k in range(1, 2 * GROWTH_STEPS)])
    assert [f.pattern for f in findings] == [Pattern.EXPONENTIAL]
    assert findings[0].evidence["of"] == {"times": "loss", "swells": "gradient norm"}[what]
    assert findings[0].evidence["rise"] > 3
    bench.findings(detector, source.rows(60))
    assert len(bench.findings(detector, [source_quiet.row(**{what: 1.3**k}) for k in range(1, 2 * GROWTH_STEPS)])) == 1


def test_widening_oscillation_is_found_once() -> None:
    bench, detector, source = begun("oscillation")

    def swinging() -> list[StepMetrics]:
        swing = [0.1 * 1.45**k for k in range(14)]
        return [source.row(times=1 + s if k % 2 else 1 / (1 + s / 2)) for k, s in enumerate(swing)]

    findings = bench.findings(detector, swinging())
    assert [f.pattern for f in findings] == [Pattern.OSCILLATING]
    assert bench.findings(detector, source.rows(60)) == []
    assert len(bench.findings(detector, swinging())) == 1, "found again after recovery"


def test_plateau_is_found_once() -> None:
    bench, source = Bench(), Source(4, loss=2.3, floor=2.3, noise=0.02)
    findings = bench.findings(Plateau(bench.normal), source.rows(4 * EARLY_UPDATES))
    assert [f.pattern for f in findings] == [Pattern.PLATEAU]
    assert findings[0].attempt < 2 * EARLY_UPDATES


def test_sudden_collapse_of_the_loss_is_found() -> None:
    bench, detector, source = begun("plateau", 200)
    findings = bench.findings(detector, [source.row(times=max(0.05, 0.9**k)) for k in range(30)])
    assert [f.pattern for f in findings] == [Pattern.OVERFIT]


@pytest.mark.parametrize("period", [4, 10])
def test_repeated_batches_are_found_once(period: int) -> None:
    bench, detector, source = begun("repeated_batches", 160)
    rng = np.random.default_rng(5)
    batches = 2.2 * np.exp(0.04 * rng.normal(size=period))
    rows = [source.row(loss=float(batches[k % period]) * 0.999**k) for k in range(120)]
    findings = bench.findings(detector, rows)
    assert len(findings) == 1
    assert findings[0].evidence["period"] % period == 0
    assert findings[0].pattern is Pattern.OVERFIT


def test_noisy_early_losses_are_not_repeated_batches() -> None:
    bench, wild, calm = Bench(), Source(1, noise=0.4), Source(2, noise=0.02)
    assert bench.findings(RepeatedBatches(bench.sight), [*wild.rows(64), *calm.rows(300)]) == []


def test_spikes_at_regular_intervals_are_found() -> None:
    bench, detector, source = begun("periodic_spikes")
    rows = [source.nan() if k % 25 == 0 else source.row() for k in range(101)]
    findings = bench.findings(detector, rows)
    assert len(findings) == 1
    assert findings[0].evidence["period"] == 25


def test_spikes_at_irregular_intervals_are_not_periodic() -> None:
    bench, detector, source = begun("periodic_spikes")
    at = {0, 11, 47, 60, 98, 103, 140}
    assert bench.findings(detector, [source.nan() if k in at else source.row() for k in range(150)]) == []


def test_large_initial_gradients_are_found_at_the_start_only() -> None:
    bench = Bench()
    (finding,) = bench.findings(LargeInitialGrads(bench.sight), Source(0, norm=5000.0).rows(50))
    assert finding.attempt == RECENT_ROWS - 1
    assert bench.findings(LargeInitialGrads(bench.sight), [*Source(0).rows(10), *Source(0, norm=5000.0).rows(10)]) == []


def test_loss_and_all_gradients_times_one_factor_is_a_rescaled_loss() -> None:
    bench, detector, source = begun("loss_rescaled")
    assert isinstance(detector, LossRescaled)
    rows, tensors = source.rows(8, times=4.0, swells=4.0), [layers(900 + k, swells=4.0) for k in range(8)]
    (finding,) = bench.findings(detector, rows, tensors)
    assert finding.evidence["factor"] == pytest.approx(4.0, rel=0.4)
    assert detector.recent_factor == pytest.approx(4.0, rel=0.4)
    assert bench.findings(detector, source.rows(20), (layers(1000 + k) for k in range(20))) == []
    assert detector.factor == detector.recent_factor == 1.0
    again = bench.findings(detector, source.rows(8, times=4.0), [layers(1100 + k, swells=4.0) for k in range(8)])
    assert len(again) == 1


def test_growth_of_some_gradients_is_no_rescaled_loss() -> None:
    bench, detector, source = begun("loss_rescaled")
    tensors = [layers(900 + k, swells=30.0, which=[0, 1]) for k in range(20)]
    assert bench.findings(detector, source.rows(20, times=4.0), tensors) == []


@pytest.mark.parametrize(("odd", "num_findings"), [((2,), 1), ((1, 2, 4), 0)])
def test_rescaled_loss_tolerates_one_deviating_row(odd: tuple[int, ...], num_findings: int) -> None:
    """In some rows the gradients deviate from the factor of the loss, as those of a small batch sometimes do."""
    bench, detector, source = begun("loss_rescaled")
    tensors = [layers(900 + k, swells=20.0 if k in odd else 4.0) for k in range(5)]
    assert len(bench.findings(detector, source.rows(5, times=4.0), tensors)) == num_findings


@pytest.mark.parametrize(("factor", "num_findings"), [(4.0, 0), (64.0, 1)])
def test_large_rescaling_tolerates_more_scatter_between_tensors(factor: float, num_findings: int) -> None:
    """Half of the tensors grow 2.5 times as much as the others."""
    bench, detector, source = begun("loss_rescaled")
    tensors = [layers(900 + k, swells=factor) for k in range(8)]
    for stats in tensors:
        stats[::2, LAYER_STATS.index("norm")] = 1.6 * factor
        stats[1::2, LAYER_STATS.index("norm")] = 0.64 * factor
    assert len(bench.findings(detector, source.rows(8, times=factor), tensors)) == num_findings


@pytest.mark.parametrize(("noise", "num_findings"), [(0.05, 1), (0.8, 0)])
def test_rescaling_within_the_loss_noise_is_not_found(noise: float, num_findings: int) -> None:
    bench, source = Bench(), Source(1, noise=noise, scatter=0.1)
    detector = LossRescaled(bench.normal)
    assert bench.findings(detector, source.rows(150), [layers(k) for k in range(150)]) == []
    level = bench.normal.loss.median
    rows = [source.row(loss=3.0 * level, swells=3.0) for _ in range(6)]
    assert len(bench.findings(detector, rows, [layers(k, swells=3.0) for k in range(6)])) == num_findings


@pytest.mark.parametrize(("zero", "num_findings"), [(2.0, 1), (-1.6, 0)])
def test_relative_rise_of_a_negative_loss_is_ignored(zero: float, num_findings: int) -> None:
    """The same rise of 0.3, above and below zero."""
    bench, source = Bench(), Source(1)
    detector = LossLevel(bench.normal, LossRescaled(bench.normal))
    losses = [0.3 * math.sin(2.0 * k) for k in range(256)]
    rows = [source.row(loss=zero + wave + (0.3 if k >= 160 else 0.0)) for k, wave in enumerate(losses)]
    assert sum(f.evidence.get("slowly", False) for f in bench.findings(detector, rows)) == num_findings
