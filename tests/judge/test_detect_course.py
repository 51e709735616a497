"""The course of loss and norm: what leaps, rises, grows, swings or stands still is told, and ordinary noise is not."""

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
def test_ordinary_noise_is_no_news(name: str, seed: int, noise: float) -> None:
    bench = Bench()
    detector = MAKE[name](bench)
    tensors = (layers(10_000 * seed + k) for k in range(400))
    assert bench.said(detector, Source(seed, noise=noise).rows(400), tensors) == []


def begun(name: str, rows: int = 150, seed: int = 1) -> tuple[Bench, Detector, Source]:
    """A detector that has seen a healthy run."""
    bench, source = Bench(), Source(seed)
    detector = MAKE[name](bench)
    assert bench.said(detector, source.rows(rows), (layers(k) for k in range(rows))) == []
    return bench, detector, source


@pytest.mark.parametrize("change", [{"times": 5.0}, {"swells": 30.0}])
def test_a_leap_is_told_at_its_first_step(change: dict[str, float]) -> None:
    bench, detector, source = begun("jump")
    at = source.attempt
    found = bench.said(detector, [*source.rows(2, **change), *source.rows(20)])
    assert [(f.attempt, f.pattern) for f in found] == [(at, Pattern.JUMP)]
    assert not found[0].severe, "once may be an accident"


def test_a_norm_that_leaps_again_soon_is_grave() -> None:
    bench, detector, source = begun("jump")
    leap = [source.row(swells=40.0), *source.rows(REPEAT_COUNT + 5)]
    again = [source.row(swells=40.0), *source.rows(REPEAT_COUNT + 5)]
    late = [*source.rows(100), source.row(swells=40.0)]
    assert [f.severe for f in bench.said(detector, [*leap, *again, *late])] == [False, True, False]


def test_a_level_that_rises_and_stays_is_told_once_and_again_after_it_came_back() -> None:
    bench, detector, source = begun("loss_level")
    (first,) = bench.said(detector, source.rows(40, times=1.5))
    assert first.attempt - 150 < 10
    assert first.evidence["level"] == pytest.approx(1.5 * first.evidence["normal"], rel=0.15)
    assert not first.severe
    assert bench.said(detector, source.rows(150)) == []
    assert len(bench.said(detector, source.rows(40, times=1.8))) == 1


def test_a_level_that_creeps_up_is_told() -> None:
    bench, detector, source = begun("loss_level")
    found = bench.said(detector, [source.row(times=1 + 0.008 * k) for k in range(60)])
    assert len(found) == 1


@pytest.mark.parametrize(("level", "grave"), [(9.0, False), (20.0, True)])
def test_a_level_that_is_not_far_above_what_this_run_has_seen_before_is_not_grave(level: float, grave: bool) -> None:
    """Early in a run whose losses have a heavy tail: several high ones may follow each other by chance."""
    bench, source = Bench(), Source(0, loss=1.0, floor=1.0)
    tail = [source.row(loss=6.0) if k % 7 == 3 else source.row() for k in range(30)]
    found = bench.said(MAKE["loss_level"](bench), [*tail, *source.rows(6, loss=level)])
    assert any(f.severe for f in found) is grave


@pytest.mark.parametrize(("one", "grave"), [(1.0, False), (12.0, True)])
def test_a_run_in_which_one_loss_of_five_is_as_ever_has_lost_nothing(one: float, grave: bool) -> None:
    """Four high ones among five may be a heavy tail's; what has been lost shows in each."""
    bench, source = Bench(), Source(0, loss=1.0, floor=1.0)
    rows = [*source.rows(60), *(source.row(loss=loss) for loss in (20.0, 8.0, one, 15.0, 12.0)), *source.rows(6)]
    found = bench.said(MAKE["loss_level"](bench), rows)
    assert any(f.severe for f in found) is grave


def test_a_run_that_has_lost_what_it_had_learnt_is_grave() -> None:
    bench, detector, source = begun("loss_level")
    found = bench.said(detector, source.rows(10, times=6.0))
    assert [f.severe for f in found][-1]
    assert found[-1].evidence["of_start"] > 2
    assert "times its start value" in found[-1].detail


@pytest.mark.parametrize("what", ["times", "swells"])
def test_growth_at_every_step_is_told_once(what: str) -> None:
    bench, detector, source = begun("growth")
    source_quiet = Source(1, noise=0.005, scatter=0.02)
    source_quiet.attempt, source_quiet.step = source.attempt, source.step
    found = bench.said(detector, [source_quiet.row(**{what: 1.3**k}) for k in range(1, 2 * GROWTH_STEPS)])
    assert [f.pattern for f in found] == [Pattern.EXPONENTIAL]
    assert found[0].evidence["of"] == {"times": "loss", "swells": "gradient norm"}[what]
    assert found[0].evidence["rise"] > 3
    bench.said(detector, source.rows(60))
    assert len(bench.said(detector, [source_quiet.row(**{what: 1.3**k}) for k in range(1, 2 * GROWTH_STEPS)])) == 1


def test_swings_that_widen_are_told_once() -> None:
    bench, detector, source = begun("oscillation")

    def swinging() -> list[StepMetrics]:
        swing = [0.1 * 1.45**k for k in range(14)]
        return [source.row(times=1 + s if k % 2 else 1 / (1 + s / 2)) for k, s in enumerate(swing)]

    found = bench.said(detector, swinging())
    assert [f.pattern for f in found] == [Pattern.OSCILLATING]
    assert bench.said(detector, source.rows(60)) == []
    assert len(bench.said(detector, swinging())) == 1, "after it was over it is news again"


def test_a_run_that_gains_nothing_is_told_once() -> None:
    bench, source = Bench(), Source(4, loss=2.3, floor=2.3, noise=0.02)
    found = bench.said(Plateau(bench.normal), source.rows(4 * EARLY_UPDATES))
    assert [f.pattern for f in found] == [Pattern.PLATEAU]
    assert found[0].attempt < 2 * EARLY_UPDATES


def test_a_loss_that_falls_out_of_all_proportion_is_told() -> None:
    bench, detector, source = begun("plateau", 200)
    found = bench.said(detector, [source.row(times=max(0.05, 0.9**k)) for k in range(30)])
    assert [f.pattern for f in found] == [Pattern.OVERFIT]


@pytest.mark.parametrize("period", [4, 10])
def test_batches_that_come_again_are_told_once(period: int) -> None:
    bench, detector, source = begun("repeated_batches", 160)
    rng = np.random.default_rng(5)
    batches = 2.2 * np.exp(0.04 * rng.normal(size=period))
    rows = [source.row(loss=float(batches[k % period]) * 0.999**k) for k in range(120)]
    found = bench.said(detector, rows)
    assert len(found) == 1
    assert found[0].evidence["period"] % period == 0
    assert found[0].pattern is Pattern.OVERFIT


def test_losses_that_scattered_far_while_a_run_learnt_the_most_do_not_come_again() -> None:
    bench, wild, calm = Bench(), Source(1, noise=0.4), Source(2, noise=0.02)
    assert bench.said(RepeatedBatches(bench.sight), [*wild.rows(64), *calm.rows(300)]) == []


def test_trouble_at_equal_distances_is_told() -> None:
    bench, detector, source = begun("periodic_spikes")
    rows = [source.nan() if k % 25 == 0 else source.row() for k in range(101)]
    found = bench.said(detector, rows)
    assert len(found) == 1
    assert found[0].evidence["period"] == 25


def test_trouble_at_odd_distances_has_no_rhythm() -> None:
    bench, detector, source = begun("periodic_spikes")
    at = {0, 11, 47, 60, 98, 103, 140}
    assert bench.said(detector, [source.nan() if k in at else source.row() for k in range(150)]) == []


def test_the_first_gradients_are_looked_at_and_only_those() -> None:
    bench = Bench()
    (found,) = bench.said(LargeInitialGrads(bench.sight), Source(0, norm=5000.0).rows(50))
    assert found.attempt == RECENT_ROWS - 1
    assert bench.said(LargeInitialGrads(bench.sight), [*Source(0).rows(10), *Source(0, norm=5000.0).rows(10)]) == []


def test_loss_and_all_gradients_times_one_factor_are_another_unit() -> None:
    bench, detector, source = begun("loss_rescaled")
    assert isinstance(detector, LossRescaled)
    rows, tensors = source.rows(8, times=4.0, swells=4.0), [layers(900 + k, swells=4.0) for k in range(8)]
    (found,) = bench.said(detector, rows, tensors)
    assert found.evidence["factor"] == pytest.approx(4.0, rel=0.4)
    assert detector.recent_factor == pytest.approx(4.0, rel=0.4)
    assert bench.said(detector, source.rows(20), (layers(1000 + k) for k in range(20))) == []
    assert detector.factor == detector.recent_factor == 1.0
    again = bench.said(detector, source.rows(8, times=4.0), [layers(1100 + k, swells=4.0) for k in range(8)])
    assert len(again) == 1


def test_some_gradients_that_grow_are_no_other_unit() -> None:
    bench, detector, source = begun("loss_rescaled")
    tensors = [layers(900 + k, swells=30.0, which=[0, 1]) for k in range(20)]
    assert bench.said(detector, source.rows(20, times=4.0), tensors) == []


@pytest.mark.parametrize(("odd", "said"), [((2,), 1), ((1, 2, 4), 0)])
def test_a_factor_may_miss_a_row_and_no_more(odd: tuple[int, ...], said: int) -> None:
    """In some rows the gradients are far from the factor of the loss, as those of a small batch are now and then."""
    bench, detector, source = begun("loss_rescaled")
    tensors = [layers(900 + k, swells=20.0 if k in odd else 4.0) for k in range(5)]
    assert len(bench.said(detector, source.rows(5, times=4.0), tensors)) == said


@pytest.mark.parametrize(("factor", "said"), [(4.0, 0), (64.0, 1)])
def test_tensors_may_scatter_further_when_all_is_multiplied_by_much(factor: float, said: int) -> None:
    """Half of them by a factor that is 2.5 times that of the others."""
    bench, detector, source = begun("loss_rescaled")
    tensors = [layers(900 + k, swells=factor) for k in range(8)]
    for one in tensors:
        one[::2, LAYER_STATS.index("norm")] = 1.6 * factor
        one[1::2, LAYER_STATS.index("norm")] = 0.64 * factor
    assert len(bench.said(detector, source.rows(8, times=factor), tensors)) == said


@pytest.mark.parametrize(("noise", "told"), [(0.05, 1), (0.8, 0)])
def test_a_factor_counts_only_where_losses_do_not_scatter_as_far_by_themselves(noise: float, told: int) -> None:
    bench, source = Bench(), Source(1, noise=noise, scatter=0.1)
    detector = LossRescaled(bench.normal)
    assert bench.said(detector, source.rows(150), [layers(k) for k in range(150)]) == []
    level = bench.normal.loss.median
    rows = [source.row(loss=3.0 * level, swells=3.0) for _ in range(6)]
    assert len(bench.said(detector, rows, [layers(k, swells=3.0) for k in range(6)])) == told


@pytest.mark.parametrize(("zero", "told"), [(2.0, 1), (-1.6, 0)])
def test_of_a_loss_below_zero_a_share_tells_nothing(zero: float, told: int) -> None:
    """The same rise of 0.3, above and below."""
    bench, source = Bench(), Source(1)
    detector = LossLevel(bench.normal, LossRescaled(bench.normal))
    losses = [0.3 * math.sin(2.0 * k) for k in range(256)]
    rows = [source.row(loss=zero + wave + (0.3 if k >= 160 else 0.0)) for k, wave in enumerate(losses)]
    assert sum(f.evidence.get("slowly", False) for f in bench.said(detector, rows)) == told
