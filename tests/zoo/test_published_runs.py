"""What public runs published, as rows."""

from __future__ import annotations

import math

import pytest

from benchmarks.zoo.other_rules import AlarmRule, NanCheck, SixSigma, TenTimesFirstHundred, ThreeTimesMeanOfTen
from benchmarks.zoo.published_runs import PRELUDE_STEPS, PUBLISHED_RUNS, PublishedRun, rows, rule_inputs

NAMES = {trace.name: trace for trace in PUBLISHED_RUNS}
each = pytest.mark.parametrize("trace", PUBLISHED_RUNS, ids=lambda trace: trace.name)


def first_alarm(rule: AlarmRule, trace: PublishedRun) -> int | None:
    """Counted from the first published step."""
    said = [rule.update(*step) for step in rule_inputs(trace)]
    return said.index(True) - PRELUDE_STEPS if any(said) else None


def test_there_is_enough_to_judge_by() -> None:
    assert len(NAMES) == len(PUBLISHED_RUNS)
    assert sum(not trace.healthy and len(trace.losses) >= 6 for trace in PUBLISHED_RUNS) >= 6
    assert sum(trace.healthy for trace in PUBLISHED_RUNS) >= 2


@each
def test_a_trace_says_where_it_comes_from_and_what_it_shows(trace: PublishedRun) -> None:
    assert trace.source.startswith("https://")
    assert trace.about.endswith(".")
    assert len(trace.losses) == len(trace.norms)
    assert 0 < trace.onset <= trace.spike < len(trace.losses)
    assert trace.every >= 1


@each
def test_the_published_steps_follow_the_made_up_ones_unchanged(trace: PublishedRun) -> None:
    told = rows(trace)
    assert len(told) == PRELUDE_STEPS + len(trace.losses)
    assert [row.step for row in told] == list(range(len(told)))
    assert str([row.loss for row in told[PRELUDE_STEPS:]]) == str(list(trace.losses))
    assert str([row.norm for row in told[PRELUDE_STEPS:]]) == str(list(trace.norms))


@each
def test_the_made_up_steps_are_calm(trace: PublishedRun) -> None:
    a, b = trace.noise
    made = rows(trace)[:PRELUDE_STEPS]
    ratios = [row.loss / trace.losses[0] for row in made]
    assert all(math.exp(-2 * a) <= ratio <= 1.02 * math.exp(2 * a) for ratio in ratios)
    if trace.has_norms:
        assert all(abs(math.log(row.norm / trace.norms[0])) <= 2 * b + 1e-9 for row in made)
    else:
        assert all(math.isnan(row.norm) for row in made)


@each
def test_the_rows_are_the_same_each_time(trace: PublishedRun) -> None:
    assert repr(rows(trace)) == repr(rows(trace))


def test_no_two_traces_share_their_noise() -> None:
    scatter = {rows(trace)[3].loss / trace.losses[0] for trace in PUBLISHED_RUNS}
    assert len(scatter) == len(PUBLISHED_RUNS)


def test_differences_of_the_loss_are_filled_in() -> None:
    told = rows(NAMES["bigscience_176b"])
    last, before, earlier = told[-1], told[-2], told[-3]
    assert math.isnan(told[0].loss_d1)
    assert last.loss_d1 == last.loss - before.loss
    assert last.loss_d2 == last.loss_d1 - (before.loss - earlier.loss)


@each
def test_rules_are_shown_a_steady_norm_where_none_was_published(trace: PublishedRun) -> None:
    norms = [norm for _, norm, _ in rule_inputs(trace)]
    assert (set(norms) == {1.0}) is not trace.has_norms


def test_loss_rules_miss_the_spike_that_the_norm_tells_beforehand() -> None:
    trace = NAMES["bigscience_176b"]
    assert first_alarm(ThreeTimesMeanOfTen(), trace) is None
    assert first_alarm(NanCheck(), trace) is None
    assert first_alarm(SixSigma(), trace) == trace.onset
    assert first_alarm(TenTimesFirstHundred(), trace) == trace.spike - 2
