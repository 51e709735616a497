"""The change test: a rise is found soon with its exact onset, and stays open until the earlier level returns."""

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
    """Logarithms of a loss that decreases by a power law."""
    return -0.3 * np.log(1 + np.arange(rows) / 50) + noise(rows, seed=seed)


def test_onset_of_a_jump_is_exact_and_it_stays_open() -> None:
    test = ChangeTest()
    values = learning(5000)
    values[3210:] += 0.5
    changes = test.feed(values)
    assert [(change.kind, change.onset) for change in changes] == [(ChangeKind.SHIFT, 3210)]
    assert changes[0].found - changes[0].onset < 15
    assert test.first_open is changes[0]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_result_does_not_depend_on_the_size_of_the_blocks(size: int) -> None:
    values = learning(2500)
    values[1500:] += 0.4
    whole, parts = ChangeTest(), ChangeTest()
    whole.feed(values)
    for start in range(0, len(values), size):
        parts.feed(values[start : start + size])
    assert [(change.kind, change.onset, change.found) for change in parts.changes] == [
        (change.kind, change.onset, change.found) for change in whole.changes
    ]


def test_raised_level_never_becomes_the_baseline() -> None:
    test = ChangeTest()
    values = np.concatenate([learning(1000), 0.5 + noise(200_000)])
    test.feed(values)
    change = test.first_open
    assert change is not None
    assert change.onset == 1000
    assert change.reference < -0.8


@pytest.mark.parametrize(("remaining", "has_recovered"), [(0.0, True), (0.1, False), (0.5, False)])
def test_recovery_means_the_old_level_not_half_of_the_peak(remaining: float, has_recovered: bool) -> None:
    flat = noise(3000)
    flat[1000:] += remaining + (1 - remaining) * np.exp(-np.arange(2000) / 100)
    test = ChangeTest()
    test.feed(flat)
    assert test.changes[0].onset == pytest.approx(1000, abs=1)
    assert (test.first_open is None) is has_recovered


def test_a_few_high_rows_are_a_spike() -> None:
    values = learning(4000)
    values[2000:2010] += 1.0
    test = ChangeTest()
    test.feed(values)
    assert [(change.kind, change.onset) for change in test.changes] == [(ChangeKind.SPIKE, 2000)]
    assert test.changes[0].end is not None


def test_second_jump_is_a_second_change_and_the_first_stays_open() -> None:
    values = learning(6000)
    values[2000:] += 0.5
    values[4000:] += 0.5
    test = ChangeTest()
    test.feed(values)
    assert [change.onset for change in test.open] == [2000, 4000]


@pytest.mark.parametrize("rows", [5000, 50_000, 300_000])
def test_slow_rise_is_found_at_any_length(rows: int) -> None:
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


def test_rise_from_the_start_is_a_trend() -> None:
    test = ChangeTest()
    test.feed(noise(20_000) + np.arange(20_000) * 1e-5)
    assert test.first_open is not None
    assert test.first_open.kind is ChangeKind.TREND


def test_early_jump_does_not_become_the_first_level() -> None:
    values = noise(500)
    values[9:] += 2.0
    test = ChangeTest()
    test.feed(values)
    assert [change.onset for change in test.open] == [9]


@pytest.mark.parametrize("tails", [3.0, 30.0])
def test_healthy_runs_have_few_false_alarms(tails: float) -> None:
    num_changes = 0
    for seed in range(10):
        chance = np.random.default_rng(seed)
        rough = chance.standard_t(tails, 30_000) * 0.03
        slow = np.convolve(chance.normal(0, 0.01, 30_100), np.full(101, 0.1), "valid")  # correlated batches
        test = ChangeTest()
        test.feed(-0.3 * np.log(1 + np.arange(30_000) / 50) + rough + 0.1 * slow)
        num_changes += len(test.changes)
    assert num_changes <= 6, "at most 20 in a million rows"


def test_fewer_false_alarms_need_a_higher_threshold() -> None:
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
