"""Baselines form early, follow the run, and exclude the rows that are being judged."""

from __future__ import annotations

import math

import pytest
from made_rows import Bench, Source, actions, judged, of, trained

from surefoot.judge.baselines import Baseline
from surefoot.judge.judge import Judge
from surefoot.judge.policy import Policy
from surefoot.judge.thresholds import WINDOW_ROWS
from surefoot.records import Diagnosis, Finding, Verdict


def test_baseline_keeps_the_last_values_and_their_median() -> None:
    known = Baseline(5)
    for k in range(12):
        known.add(k, float(k))
    assert (len(known), known.median, known.max, known.last) == (5, 9.0, 11.0, 11.0)
    known.drop_from(10)
    assert (len(known), known.max) == (3, 9.0)
    known.add(10, math.nan)
    known.add(10, math.inf)
    assert len(known) == 3, "non-finite values are left out"
    known.drop_from(0)
    assert len(known) == 0
    assert math.isnan(known.median)


def test_constant_values_have_a_nonzero_spread() -> None:
    known = Baseline(8)
    for k in range(8):
        known.add(k, 2.0)
    assert 0 < known.sigma < 0.01


def test_baselines_form_within_the_first_dozens_of_steps() -> None:
    bench, source = Bench(), Source(0)
    formed = next(k for k in range(100) if bench.add([source.row()]) or bench.normal.ready)
    assert formed < 40
    judge, source = Judge(Policy()), Source(0)
    judged(judge, source.rows(48))
    assert [f.detector for f in of(Finding, judged(judge, [source.row(swells=50.0)]))] == ["jump"]


def test_newest_rows_are_not_in_the_baseline_yet() -> None:
    bench, source = Bench(), Source(0, half=1e9)
    bench.add(source.rows(150))
    median = bench.normal.loss.median
    bench.add(source.rows(WINDOW_ROWS, times=1.3))
    assert bench.normal.loss.median == pytest.approx(median, rel=0.03)
    bench.add(source.rows(150, times=1.3))
    assert bench.normal.loss.median == pytest.approx(1.3 * median, rel=0.03)


def test_spikes_enter_the_baseline_only_if_they_last() -> None:
    bench, source = Bench(), Source(0)
    for k in range(200):
        bench.add([source.row(swells=100.0 if k % 40 == 39 else 1.0)])
    assert bench.normal.log_norms[0].max < math.log(4.0)


def test_refused_rows_do_not_enter_the_baseline() -> None:
    bench, source = Bench(), Source(0)
    bench.add(source.rows(100))

    def normal() -> list[object]:
        state = bench.normal.state_dict()
        return [state[name] for name in ("loss", "norms", "rates", "recent", "landed", "waiting")]

    before = repr(normal())
    bench.add((source.nan(), source.far(), source.row(verdict=Verdict.OVERFLOW)))
    assert repr(normal()) == before


def test_rewind_removes_later_rows_from_the_baseline() -> None:
    bench, source = Bench(), Source(0)
    bench.add(source.rows(100))
    bench.add(source.rows(50, times=1.2, lr=5e-3))
    assert bench.normal.lrs[0].last == 5e-3
    bench.normal.rewound(99)
    assert bench.normal.lrs[0].last == 1e-3
    assert list(bench.normal.recent_losses) == []


def test_each_optimizer_has_its_own_norm_baseline() -> None:
    bench, source = Bench(), Source(0)
    for _ in range(100):
        bench.add([source.row(), source.row(optimizer=1, swells=1000.0)])
    for optimizer, is_spike in ((1, False), (0, True)):
        bench.normal.compare(source.row(optimizer=optimizer, swells=1000.0))
        assert bench.normal.is_spike is is_spike


@pytest.mark.parametrize("seed", range(3))
def test_loss_that_halves_over_200_steps_raises_nothing(seed: int) -> None:
    source = Source(seed, loss=3.0, floor=0.0, half=200.0)
    assert of(Finding, judged(Judge(Policy()), source.rows(800))) == []


@pytest.mark.parametrize("seed", range(3))
def test_noisy_small_batches_raise_nothing(seed: int) -> None:
    source = Source(seed, noise=0.35, scatter=0.6)
    assert of(Finding, judged(Judge(Policy()), source.rows(800))) == []


@pytest.mark.parametrize("seed", range(3))
def test_warm_restart_of_the_lr_raises_nothing(seed: int) -> None:
    """The lr decays in each of four cycles and then restarts four times as high; the loss rises a little with it."""
    source, judge = Source(seed), Judge(Policy())
    for _ in range(4):
        rows = [source.row(lr=4e-3 * 0.25 ** (k / 150), times=1 + 0.04 * 0.9**k) for k in range(150)]
        assert of(Finding, judged(judge, rows)) == []


@pytest.mark.parametrize("seed", range(3))
def test_lasting_change_of_data_is_reported_once_without_action(seed: int) -> None:
    judge, source = trained(source=Source(seed), rows=250)
    events = judged(judge, source.rows(300, times=1.35))
    assert [f.detector for f in of(Finding, events)] == ["loss_level"]
    assert of(Diagnosis, events) != []
    assert actions(events) == []
    assert judge.quiet, "by now it is the baseline"
