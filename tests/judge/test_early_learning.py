"""Broken from the first update: the loss is compared with the first one, with the scatter of single batches in mind."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest

from surefoot.judge.early_learning import EarlyLearning
from surefoot.records import Finding, StepMetrics, Verdict


def findings_in(early: EarlyLearning, losses: Sequence[float], norms: Sequence[float] = ()) -> list[Finding]:
    """What is reported about a run with these losses, until it has proven to learn."""
    found = []
    for k, loss in enumerate(losses):
        if early.proven:
            break
        norm = norms[k] if norms else 1.0
        found.append(early.update(StepMetrics(step=k, attempt=k, time=float(k), loss=loss, norm=norm)))
    return [finding for finding in found if finding is not None]


def scattered(rng: random.Random, level: Callable[[int], float], count: int, scatter: float) -> list[float]:
    return [level(k) * math.exp(rng.gauss(0.0, scatter)) for k in range(count)]


@pytest.mark.parametrize("scatter", [0.02, 0.1, 0.35, 0.6])
def test_noise_around_a_level_is_rarely_reported(scatter: float) -> None:
    """A task on which nothing can be learnt: the first batch may happen to be an easy one."""
    reported = 0
    for seed in range(60):
        rng = random.Random(seed)
        losses = scattered(rng, lambda _: 1.0, 400, scatter)
        norms = scattered(rng, lambda _: 1.0, 400, scatter)
        reported += bool(findings_in(EarlyLearning(), losses, norms))
    assert reported <= 12


@pytest.mark.parametrize("scatter", [0.02, 0.1, 0.2])
@pytest.mark.parametrize(
    ("course", "said"),
    [
        (lambda k: 2.3 if k < 2 else 11.0, "exploded"),
        (lambda k: 2.3 * 1.3**k, "exploded"),
        (lambda k: 2.3 * (0.2 if 10 <= k < 30 else 1.0), "is back at"),
        (lambda k: 60.0 if 1 <= k < 4 else 2.3, "has not fallen"),
    ],
    ids=["leaps", "grows", "falls_back", "violent_and_stuck"],
)
def test_a_broken_start_is_reported(course: Callable[[int], float], said: str, scatter: float) -> None:
    for seed in range(10):
        found = findings_in(EarlyLearning(), scattered(random.Random(seed), course, 160, scatter))
        assert found
        assert said in found[0].detail, found[0].detail


def test_a_run_that_learns_is_proven_without_a_word() -> None:
    for seed in range(10):
        early = EarlyLearning()
        losses = scattered(random.Random(seed), lambda k: 0.5 + 1.8 * math.exp(-k / 60), 400, 0.1)
        assert not findings_in(early, losses)
        assert early.proven


def test_gradients_that_died_after_a_leap_are_a_broken_start() -> None:
    norms = [1.0, 400.0, *[0.01] * 158]
    (found, *_) = findings_in(EarlyLearning(), [2.3] * 160, norms)
    assert "has not fallen" in found.detail
    assert found.evidence["violent"]


def test_a_calm_plateau_is_left_alone() -> None:
    assert not findings_in(EarlyLearning(), scattered(random.Random(0), lambda _: 2.3, 900, 0.01))


def test_the_same_trouble_is_reported_again_only_when_the_run_has_doubled() -> None:
    found = findings_in(EarlyLearning(), [2.3, *[40.0] * 999])
    attempts = [finding.attempt for finding in found]
    assert 3 <= len(attempts) <= 8
    assert all(later >= 1.5 * earlier for earlier, later in itertools.pairwise(attempts))


def test_three_refusals_among_the_first_updates_are_reported() -> None:
    early = EarlyLearning()
    rows = [StepMetrics(step=0, attempt=k, time=0.0, loss=2.0, norm=1.0, verdict=Verdict(k > 8)) for k in range(30)]
    found = [finding for finding in map(early.update, rows) if finding is not None]
    assert "were refused" in found[0].detail


def test_a_resumed_run_is_judged_as_if_it_had_gone_on() -> None:
    losses = scattered(random.Random(3), lambda k: 2.3 if k < 40 else 9.0, 120, 0.1)
    whole, first, second = EarlyLearning(), EarlyLearning(), EarlyLearning()
    expected = findings_in(whole, losses)
    found = findings_in(first, losses[:50])
    second.load_state_dict(first.state_dict())
    found += findings_in(second, losses[50:])
    assert [f.detail for f in found] == [f.detail for f in expected]
    assert second.state_dict() == whole.state_dict()


def test_an_eval_loss_that_fell_proves_learning_where_single_batches_cost_orders_of_magnitude_more() -> None:
    def course(k: int) -> float:
        return 60.0 if 1 <= k < 4 else 2.3

    for evals, reported in (([1.9, 1.0], False), ([60.0, 2.9], True), ([1.9, 1.8], True)):
        early, found = EarlyLearning(), []
        for k, loss in enumerate(scattered(random.Random(1), course, 160, 0.1)):
            eval_loss = evals[k >= 50] if k % 25 == 24 else math.nan
            row = StepMetrics(step=k, attempt=k, time=float(k), loss=loss, norm=1.0, eval_loss=eval_loss)
            found.append(early.update(row))
        assert any(found) is reported
        assert early.proven is not reported
        restored = EarlyLearning()
        restored.load_state_dict(early.state_dict())
        assert restored.state_dict() == early.state_dict()


def test_what_a_trial_has_just_looked_into_is_in_no_doubt_for_as_long_again() -> None:
    early = EarlyLearning()
    doubtful: list[bool] = []
    for k in range(60):
        early.update(StepMetrics(step=k, attempt=k, time=float(k), loss=2.3, norm=1.0))
        if k == 20:
            early.dismissed()
        doubtful.append(early.doubtful)
    assert all(doubtful[:20])
    assert not any(doubtful[20:41])
    assert all(doubtful[41:])
