"""The order in which several optimizers step, and where an iteration of the loop ends."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import pytest

from surefoot.guard.iteration_order import IterationOrder

CRITIC, GENERATOR = 0, 1


def ends(steps: Iterable[int | None], *, together: bool = False) -> tuple[list[int], IterationOrder]:
    """The number of steps at each recognised end of an iteration that was not withdrawn."""
    order, iteration_ends = IterationOrder(2), list[int]()
    for place, k in enumerate(steps):
        order.step(k, place // 2 if together else place)
        if order.withdrawn is not None:
            assert iteration_ends.pop() == place
        if order.ended:
            iteration_ends.append(place + 1)
    return iteration_ends, order


@pytest.mark.parametrize(
    "cycle",
    [
        [CRITIC, GENERATOR],
        [CRITIC] * 5 + [GENERATOR],
        [GENERATOR] + [CRITIC] * 5,
        [CRITIC, GENERATOR, GENERATOR],
        [CRITIC, GENERATOR, CRITIC],
    ],
)
def test_repeated_cycle_is_recognised_as_one_iteration(cycle: list[int]) -> None:
    iteration_ends, order = ends(cycle * 6)
    assert iteration_ends == [len(cycle) * n for n in range(2, 7)], "the end of the first is not recognised yet"
    assert order.completed == 6


def test_optimizers_on_one_backward_end_an_iteration_immediately() -> None:
    iteration_ends, order = ends([0, 1] * 4, together=True)
    assert iteration_ends == [2, 4, 6, 8]
    assert order.completed == 4


def test_single_optimizer_ends_an_iteration_with_each_step() -> None:
    order = IterationOrder(1)
    for attempt in range(5):
        order.step(0, attempt)
        assert order.ended
    assert order.completed == 5


def test_generator_that_steps_every_fifth_iteration_never_ends_one_early() -> None:
    steps = [k for i in range(40) for k in ([CRITIC, GENERATOR] if i % 5 == 0 else [CRITIC])]
    iteration_ends, _ = ends(steps)
    assert len(iteration_ends) > 4
    for place in iteration_ends:
        assert place == len(steps) or steps[place] == CRITIC, "the next step begins an iteration"


def test_occasional_extra_steps_belong_to_their_iteration() -> None:
    """As in lazy regularisation, each optimizer has a second step in some iterations."""
    each = [[GENERATOR] * (1 + (i % 4 == 0)) + [CRITIC] * (1 + (i % 16 == 0)) for i in range(64)]
    true = list(itertools.accumulate(map(len, each)))
    iteration_ends, order = ends(itertools.chain(*each))
    assert set(iteration_ends) <= set(true)
    assert len(iteration_ends) > len(true) / 2
    assert order.completed == 64


def test_optimizer_alone_counts_by_itself_until_the_other_starts() -> None:
    iteration_ends, order = ends([CRITIC] * 100 + [CRITIC, GENERATOR] * 10)
    assert order.completed == 110
    assert iteration_ends[-9:] == list(range(104, 121, 2)), (
        "the critic's step before the generator's first ended no iteration"
    )
    assert 101 not in iteration_ends


def test_steps_in_random_order_are_counted_one_by_one() -> None:
    chance = random.Random(0)
    order = IterationOrder(3)
    for attempt in range(3000):
        order.step(chance.choice([0, 1, 2]), attempt)
    assert order.ended
    assert order.completed > 100


def test_steps_skipped_by_loss_scaling_do_not_shift_iterations() -> None:
    iteration_ends, order = ends(
        [None, None, CRITIC, GENERATOR, CRITIC, GENERATOR, None, GENERATOR, CRITIC, None, CRITIC, GENERATOR]
    )
    assert iteration_ends == [4, 6, 8, 10, 12]
    assert order.completed == 6


def test_order_survives_a_resume() -> None:
    _, before = ends(([CRITIC] * 5 + [GENERATOR]) * 3)
    after = IterationOrder(2)
    after.load_state_dict(before.state_dict())
    ended = []
    for attempt, k in enumerate(([CRITIC] * 5 + [GENERATOR]) * 2):
        after.step(k, attempt)
        ended.append(after.ended)
    assert ended == ([False] * 5 + [True]) * 2
    assert after.completed == 2


def test_unrecognised_order_stays_unknown_after_a_resume() -> None:
    _, before = ends([CRITIC, CRITIC, GENERATOR])
    after = IterationOrder(2)
    after.load_state_dict(before.state_dict())
    after.step(CRITIC, 0)
    after.step(GENERATOR, 1)
    assert not after.ended
