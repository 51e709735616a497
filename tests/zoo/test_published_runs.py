"""Published runs as rows."""

from __future__ import annotations

import math

import pytest

from benchmarks.zoo.other_rules import AlarmRule, NanCheck, SixSigma, TenTimesFirstHundred, ThreeTimesMeanOfTen
from benchmarks.zoo.published_runs import PRELUDE_STEPS, PUBLISHED_RUNS, PublishedRun, rows, rule_inputs

NAMES = {trace.name: trace for trace in PUBLISHED_RUNS}
each_run = pytest.mark.parametrize("trace", PUBLISHED_RUNS, ids=lambda trace: trace.name)


def first_alarm(rule: AlarmRule, trace: PublishedRun) -> int | None:
    """The first alarm, counted from the first published step."""
    alarms = [rule.update(*step) for step in rule_inputs(trace)]
    return alarms.index(True) - PRELUDE_STEPS if any(alarms) else None


def test_there_are_enough_runs() -> None:
    assert len(NAMES) == len(PUBLISHED_RUNS)
    assert sum(not trace.healthy and len(trace.losses) >= 6 for trace in PUBLISHED_RUNS) >= 6
    assert sum(trace.healthy for trace in PUBLISHED_RUNS) >= 2


@each_run
def test_runs_have_a_source_and_consistent_fields(trace: PublishedRun) -> None:
    assert trace.source.startswith("https://")
    assert trace.about.endswith(".")
    assert len(trace.losses) == len(trace.norms)
    assert 0 < trace.onset <= trace.spike < len(trace.losses)
    assert trace.every >= 1


@each_run
def test_published_steps_follow_the_synthetic_ones_unchanged(trace: PublishedRun) -> None:
    run_rows = rows(trace)
    assert len(run_rows) == PRELUDE_STEPS + len(trace.losses)
    assert [row.step for row in run_rows] == list(range(len(run_rows)))
    assert str([row.loss for row in run_rows[PRELUDE_STEPS:]]) == str(list(trace.losses))
    assert str([row.norm for row in run_rows[PRELUDE_STEPS:]]) == str(list(trace.norms))


@each_run
def test_synthetic_steps_have_bounded_noise(trace: PublishedRun) -> None:
    a, b = trace.noise
    prelude = rows(trace)[:PRELUDE_STEPS]
    ratios = [row.loss / trace.losses[0] for row in prelude]
    assert all(math.exp(-2 * a) <= ratio <= 1.02 * math.exp(2 * a) for ratio in ratios)
    if trace.has_norms:
        assert all(abs(math.log(row.norm / trace.norms[0])) <= 2 * b + 1e-9 for row in prelude)
    else:
        assert all(math.isnan(row.norm) for row in prelude)


@each_run
def test_rows_are_deterministic(trace: PublishedRun) -> None:
    assert repr(rows(trace)) == repr(rows(trace))


def test_no_two_runs_have_the_same_noise() -> None:
    scatter = {rows(trace)[3].loss / trace.losses[0] for trace in PUBLISHED_RUNS}
    assert len(scatter) == len(PUBLISHED_RUNS)


def test_loss_differences_are_filled_in() -> None:
    run_rows = rows(NAMES["bigscience_176b"])
    last, before, earlier = run_rows[-1], run_rows[-2], run_rows[-3]
    assert math.isnan(run_rows[0].loss_d1)
    assert last.loss_d1 == last.loss - before.loss
    assert last.loss_d2 == last.loss_d1 - (before.loss - earlier.loss)


@each_run
def test_rules_get_a_constant_norm_where_none_was_published(trace: PublishedRun) -> None:
    norms = [norm for _, norm, _ in rule_inputs(trace)]
    assert (set(norms) == {1.0}) is not trace.has_norms


def test_loss_rules_miss_the_spike_that_the_norm_predicts() -> None:
    trace = NAMES["bigscience_176b"]
    assert first_alarm(ThreeTimesMeanOfTen(), trace) is None
    assert first_alarm(NanCheck(), trace) is None
    assert first_alarm(SixSigma(), trace) == trace.onset
    assert first_alarm(TenTimesFirstHundred(), trace) == trace.spike - 2
