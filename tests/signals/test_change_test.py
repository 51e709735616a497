"""A rise is found soon, dated to its row, and stays open until the level before is reached again."""

from __future__ import annotations

import json

import numpy as np
import pytest
from numpy.typing import NDArray

from surefoot.signals.baseline import LevelHistory
from surefoot.signals.change import ChangeKind
from surefoot.signals.change_test import ChangeTest, alarm_threshold
from surefoot.signals.dating import find_step

Floats = NDArray[np.float64]


def noise(rows: int, size: float = 0.03, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).normal(0, size, rows)


def learning(rows: int, seed: int = 0) -> Floats:
    """Logarithms of a loss that falls as a power of the step."""
    return -0.3 * np.log(1 + np.arange(rows) / 50) + noise(rows, seed=seed)


def test_a_jump_is_dated_to_its_row_and_stays_open() -> None:
    test = ChangeTest()
    values = learning(5000)
    values[3210:] += 0.5
    found = test.feed(values)
    assert [(change.kind, change.onset) for change in found] == [(ChangeKind.SHIFT, 3210)]
    assert found[0].found - found[0].onset < 15
    assert test.first_open is found[0]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_rows_may_come_one_by_one_or_many_at_once(size: int) -> None:
    values = learning(2500)
    values[1500:] += 0.4
    whole, parts = ChangeTest(), ChangeTest()
    whole.feed(values)
    for start in range(0, len(values), size):
        parts.feed(values[start : start + size])
    assert [(one.kind, one.onset, one.found) for one in parts.changes] == [
        (one.kind, one.onset, one.found) for one in whole.changes
    ]


def test_a_level_that_was_not_accepted_never_becomes_normal() -> None:
    test = ChangeTest()
    values = np.concatenate([learning(1000), 0.5 + noise(200_000)])
    test.feed(values)
    change = test.first_open
    assert change is not None
    assert change.onset == 1000
    assert change.reference < -0.8


@pytest.mark.parametrize(("rest", "back"), [(0.0, True), (0.1, False), (0.5, False)])
def test_back_is_the_old_level_and_not_half_of_the_peak(rest: float, back: bool) -> None:
    flat = noise(3000)
    flat[1000:] += rest + (1 - rest) * np.exp(-np.arange(2000) / 100)
    test = ChangeTest()
    test.feed(flat)
    assert test.changes[0].onset == pytest.approx(1000, abs=1)
    assert (test.first_open is None) is back


def test_a_few_high_rows_are_a_spike() -> None:
    values = learning(4000)
    values[2000:2010] += 1.0
    test = ChangeTest()
    test.feed(values)
    assert [(change.kind, change.onset) for change in test.changes] == [(ChangeKind.SPIKE, 2000)]
    assert test.changes[0].end is not None


def test_a_further_jump_is_a_change_of_its_own_and_the_first_stays_open() -> None:
    values = learning(6000)
    values[2000:] += 0.5
    values[4000:] += 0.5
    test = ChangeTest()
    test.feed(values)
    assert [change.onset for change in test.open] == [2000, 4000]


@pytest.mark.parametrize("rows", [5000, 50_000, 300_000])
def test_a_slow_rise_is_found_however_long_it_takes(rows: int) -> None:
    values = learning(rows)
    begin = rows // 2
    values[begin:] = values[begin - 50 : begin].mean() + 0.1 * np.arange(rows - begin) / (rows - begin)
    values[begin:] += noise(rows - begin, seed=1)
    test = ChangeTest()
    test.feed(values)
    change = test.first_open
    assert change is not None
    assert change.kind is ChangeKind.DRIFT
    assert 0.4 * rows < change.onset < 0.8 * rows


def test_a_rise_from_the_beginning_is_a_trend() -> None:
    test = ChangeTest()
    test.feed(noise(20_000) + np.arange(20_000) * 1e-5)
    assert test.first_open is not None
    assert test.first_open.kind is ChangeKind.TREND


def test_values_far_above_the_first_ones_are_no_first_level() -> None:
    values = noise(500)
    values[9:] += 2.0
    test = ChangeTest()
    test.feed(values)
    assert [change.onset for change in test.open] == [9]


@pytest.mark.parametrize("tails", [3.0, 30.0])
def test_healthy_runs_raise_hardly_an_alarm(tails: float) -> None:
    found = 0
    for seed in range(10):
        chance = np.random.default_rng(seed)
        rough = chance.standard_t(tails, 30_000) * 0.03
        slow = np.convolve(chance.normal(0, 0.01, 30_100), np.full(101, 0.1), "valid")  # batches that are alike
        test = ChangeTest()
        test.feed(-0.3 * np.log(1 + np.arange(30_000) / 50) + rough + 0.1 * slow)
        found += len(test.changes)
    assert found <= 6, "20 in a million"


def test_fewer_false_alarms_cost_a_higher_threshold() -> None:
    thresholds = [alarm_threshold(target) for target in (10.0, 1.0, 0.1)]
    assert thresholds == sorted(thresholds)


def test_a_small_step_that_was_seen_late_is_dated_to_its_row() -> None:
    values = noise(40_000, 0.02)
    values[20_000:] += 0.06
    test = ChangeTest()
    test.feed(values)
    change = test.changes[0]
    at = find_step(values, change) if change.slow else change.onset
    assert at == pytest.approx(20_000, abs=5)


@pytest.mark.parametrize("at", [10, 1490, 1503, 2100])
def test_a_test_that_was_saved_goes_on_as_if_it_had_not_been(at: int) -> None:
    values = learning(4000)
    values[1500:] += 0.4
    values[2000:2600] -= 0.4
    whole, first, second = ChangeTest(), ChangeTest(), ChangeTest()
    whole.feed(values)
    first.feed(values[:at])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.feed(values[at:])
    assert second.state_dict() == whole.state_dict()


def test_a_history_of_any_length_is_bounded_and_keeps_its_best() -> None:
    history = LevelHistory()
    values = np.concatenate([np.full(50_000, 1.0), np.full(50_000, 0.0), np.full(200_000, 0.5)])
    for row in range(0, len(values), 1000):
        history.add(row, values[row : row + 1000])
    assert len(history.levels) <= 128
    best = history.rows[int(np.argmin(history.levels))]
    assert 50_000 - history.block <= best <= 100_000
    assert history.rows == sorted(history.rows)
