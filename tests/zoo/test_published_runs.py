"""What public runs published, as rows."""

from __future__ import annotations

import math

import pytest

from benchmarks.zoo.other_rules import NanCheck, Rule, SixSigma, TenTimesFirstHundred, ThreeTimesMeanOfTen
from benchmarks.zoo.published_runs import PRELUDE, TRACES, Trace, rows, shown

NAMES = {trace.name: trace for trace in TRACES}
each = pytest.mark.parametrize("trace", TRACES, ids=lambda trace: trace.name)


def first_alarm(rule: Rule, trace: Trace) -> int | None:
    """Counted from the first published step."""
    said = [rule.update(*step) for step in shown(trace)]
    return said.index(True) - PRELUDE if any(said) else None


def test_there_is_enough_to_judge_by() -> None:
    assert len(NAMES) == len(TRACES)
    assert sum(not trace.healthy and len(trace.losses) >= 6 for trace in TRACES) >= 6
    assert sum(trace.healthy for trace in TRACES) >= 2


@each
def test_a_trace_says_where_it_comes_from_and_what_it_shows(trace: Trace) -> None:
    assert trace.source.startswith("https://")
    assert trace.about.endswith(".")
    assert len(trace.losses) == len(trace.norms)
    assert 0 < trace.onset <= trace.spike < len(trace.losses)
    assert trace.every >= 1


@each
def test_the_published_steps_follow_the_made_up_ones_unchanged(trace: Trace) -> None:
    told = rows(trace)
    assert len(told) == PRELUDE + len(trace.losses)
    assert [row.step for row in told] == list(range(len(told)))
    assert str([row.loss for row in told[PRELUDE:]]) == str(list(trace.losses))
    assert str([row.norm for row in told[PRELUDE:]]) == str(list(trace.norms))


@each
def test_the_made_up_steps_are_calm(trace: Trace) -> None:
    a, b = trace.noise
    made = rows(trace)[:PRELUDE]
    ratios = [row.loss / trace.losses[0] for row in made]
    assert all(math.exp(-2 * a) <= ratio <= 1.02 * math.exp(2 * a) for ratio in ratios)
    if trace.normed:
        assert all(abs(math.log(row.norm / trace.norms[0])) <= 2 * b + 1e-9 for row in made)
    else:
        assert all(math.isnan(row.norm) for row in made)


@each
def test_the_rows_are_the_same_each_time(trace: Trace) -> None:
    assert repr(rows(trace)) == repr(rows(trace))


def test_no_two_traces_share_their_noise() -> None:
    scatter = {rows(trace)[3].loss / trace.losses[0] for trace in TRACES}
    assert len(scatter) == len(TRACES)


def test_differences_of_the_loss_are_filled_in() -> None:
    told = rows(NAMES["bigscience_176b"])
    last, before, earlier = told[-1], told[-2], told[-3]
    assert math.isnan(told[0].loss_d1)
    assert last.loss_d1 == last.loss - before.loss
    assert last.loss_d2 == last.loss_d1 - (before.loss - earlier.loss)


@each
def test_rules_are_shown_a_steady_norm_where_none_was_published(trace: Trace) -> None:
    norms = [norm for _, norm, _ in shown(trace)]
    assert (set(norms) == {1.0}) is not trace.normed


def test_loss_rules_miss_the_spike_that_the_norm_tells_beforehand() -> None:
    trace = NAMES["bigscience_176b"]
    assert first_alarm(ThreeTimesMeanOfTen(), trace) is None
    assert first_alarm(NanCheck(), trace) is None
    assert first_alarm(SixSigma(), trace) == trace.onset
    assert first_alarm(TenTimesFirstHundred(), trace) == trace.spike - 2
