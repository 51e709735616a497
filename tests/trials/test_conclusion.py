"""What follows from the branches of a trial."""

from __future__ import annotations

import math

import pytest

from surefoot.checkpoint.rng import RngStates, get_torch_rng_states
from surefoot.records import Cause, StepMetrics
from surefoot.trials.branches import BranchId, BranchResult, is_better
from surefoot.trials.conclusion import DATA_CAUSES, SAME, Conclusion, Deviation, conclude, first_difference
from surefoot.trials.kept_steps import KeptStep
from surefoot.trials.runner import ceiling_between

NOBODY = frozenset[Cause]()
GOOD = (1.00, 1.10, 0.90, 1.05)
BAD = tuple(loss + 1.0 for loss in GOOD)


def rows(losses: list[float], norms: list[float]) -> dict[int, StepMetrics]:
    pairs = enumerate(zip(losses, norms, strict=True))
    return {k: StepMetrics(step=k, attempt=k, time=0.0, loss=loss, norm=norm) for k, (loss, norm) in pairs}


def replay(losses: list[float], norms: list[float]) -> BranchResult:
    return BranchResult(BranchId.REPLAY, (), dict(enumerate(losses)), dict(enumerate(norms)))


@pytest.mark.parametrize(
    ("losses", "norms", "kind", "attempt"),
    [
        ([2.0, 1.9, 1.8, 1.7], [0.5, 0.5, 0.5, 0.5], Deviation.NONE, -1),
        ([2.0, 1.9, 5.0, 4.8], [0.5, 0.5, 9.0, 8.0], Deviation.LOSS, 2),
        ([2.0, 1.9, 3.6, 3.4], [0.5, 0.5, 1.0, 1.0], Deviation.UNIT, 2),
        ([2.0, 1.9, 1.8, 4.0], [0.5, 0.5, 7.0, 6.0], Deviation.GRADIENT, 2),
        ([2.0, 1.9, math.nan, math.nan], [0.5, 0.5, math.nan, math.nan], Deviation.LOSS, 2),
        ([2.0, 2.3, 1.8, 1.7], [0.5, 0.5, 0.5, 0.5], Deviation.NONE, -1),
    ],
    ids=["same", "weights", "unit", "gradient", "non-finite", "one odd step"],
)
def test_the_first_difference_is_dated_and_named(
    losses: list[float], norms: list[float], kind: Deviation, attempt: int
) -> None:
    difference = first_difference(rows(losses, norms), replay([2.0, 1.9, 1.8, 1.7], [0.5, 0.5, 0.5, 0.5]))
    assert (difference.kind, difference.attempt) == (kind, attempt)


def test_a_difference_in_the_gradients_that_comes_again_is_no_transient_one() -> None:
    steps = [2.0, 1.9, 1.8, 1.7, 1.6, 1.5]
    again = replay(steps, [0.5] * 6)
    every_step = first_difference(rows([2.0, 1.9, 1.81, 1.72, 1.63, 1.9], [0.5, 0.5, 0.9, 1.2, 1.1, 1.3]), again)
    once = first_difference(rows([2.0, 1.9, 1.8, 2.9, 2.8, 2.7], [0.5, 0.5, 9.0, 2.0, 2.0, 2.0]), again)
    assert (every_step.kind, every_step.attempt, every_step.lasting) == (Deviation.GRADIENT, 2, True)
    assert (once.kind, once.attempt, once.lasting) == (Deviation.GRADIENT, 2, False)
    branches = results(nothing=BAD, replay=GOOD)
    named = [conclude(branches, GOOD, d, NOBODY, clipped=False, update_excess=1.0).causes for d in (every_step, once)]
    assert Cause.ACCUMULATION in named[0] & named[1]
    assert Cause.TRANSIENT in named[1] - named[0]


def conclusion(
    branches: dict[BranchId, BranchResult], changed: frozenset[Cause] = NOBODY, *, clipped: bool = False
) -> Conclusion:
    return conclude(branches, GOOD, SAME, changed, clipped=clipped, update_excess=1.0)


def results(**losses: tuple[float, ...]) -> dict[BranchId, BranchResult]:
    return {BranchId(name): BranchResult(BranchId(name), values) for name, values in losses.items()}


def test_nothing_is_done_where_no_branch_is_better() -> None:
    close = tuple(loss + 0.002 for loss in GOOD)
    found = conclusion(results(nothing=close, replay=close, skip=GOOD, clip=GOOD))
    assert not found.harmed
    assert found.best is BranchId.NOTHING


def test_settings_that_alone_cure_are_the_cause() -> None:
    changed = frozenset({Cause.LEARNING_RATE, Cause.SCHEDULE})
    better = tuple(loss - 0.1 for loss in GOOD)
    branches = results(nothing=BAD, replay=BAD, old_settings=better, skip=GOOD)
    found = conclusion(branches, changed)
    assert found.best is BranchId.OLD_SETTINGS
    assert found.causes == changed


def test_smaller_updates_win_only_where_the_run_is_worse_than_it_was() -> None:
    improving = tuple(loss - 0.3 for loss in GOOD)
    lower = tuple(loss - 0.6 for loss in GOOD)
    branches = results(nothing=improving, replay=improving, old_settings=lower, clip=lower, skip=improving)
    found = conclusion(branches, frozenset({Cause.LEARNING_RATE}), clipped=True)
    assert not found.harmed


def test_a_branch_worse_than_its_snapshot_is_not_continued() -> None:
    half = tuple(loss + 0.5 for loss in GOOD)
    found = conclusion(results(nothing=BAD, replay=BAD, skip=half))
    assert found.best is BranchId.REWIND


def test_non_finite_probes_lose_against_everything_finite() -> None:
    broken = (math.nan,) * len(GOOD)
    assert is_better(BAD, broken)
    assert not is_better(broken, BAD)
    assert not is_better(broken, broken)


def test_smaller_updates_that_do_less_harm_are_no_sign_of_too_high_a_learning_rate() -> None:
    less_bad = {BranchId.LR_03: BranchResult(BranchId.LR_03, tuple(loss + 0.3 for loss in GOOD))}
    found = conclusion(results(nothing=BAD, replay=BAD, skip=BAD) | less_bad)
    assert found.best is BranchId.REWIND
    assert not found.causes

    cured = {BranchId.LR_03: BranchResult(BranchId.LR_03, GOOD)}
    assert conclusion(results(nothing=BAD, replay=BAD, skip=BAD) | cured).causes == {Cause.LEARNING_RATE}


def test_where_other_batches_do_no_harm_it_is_the_batches() -> None:
    branches = results(nothing=BAD, replay=BAD, skip=GOOD, old_batches=GOOD)
    changed = frozenset({Cause.LEARNING_RATE})
    assert conclusion(branches, changed).causes == DATA_CAUSES
    assert conclusion(branches | results(old_batches=BAD, old_settings=GOOD), changed).causes == changed


def test_a_ceiling_lies_between_healthy_losses_and_most_of_the_harmful_ones() -> None:
    def kept(losses: list[float]) -> list[KeptStep]:
        return [KeptStep(k, rng(), row=row) for k, row in rows(losses, [1.0] * len(losses)).items()]

    def rng() -> RngStates:
        return get_torch_rng_states(set())

    healthy = [1.0, 1.1, 0.9, 1.2, 1.0, 1.1]
    suspects = frozenset({6, 7, 8})
    assert ceiling_between(kept([*healthy, 2.0, 1.1, 2.2]), 6, suspects) == pytest.approx(1.275)
    assert ceiling_between(kept([*healthy, 1.2, 1.1, 1.0]), 6, suspects) == math.inf, "no ceiling tells them apart"
