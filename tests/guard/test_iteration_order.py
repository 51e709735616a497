"""The order in which several optimizers step, and where an iteration of the loop ends."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import pytest

from surefoot.guard.iteration_order import IterationOrder

CRITIC, MAKER = 0, 1


def ends(steps: Iterable[int | None], *, together: bool = False) -> tuple[list[int], IterationOrder]:
    """How many steps were made at each recognised end of an iteration, none of which was withdrawn."""
    order, found = IterationOrder(2), list[int]()
    for place, k in enumerate(steps):
        order.step(k, place // 2 if together else place)
        if order.withdrawn is not None:
            assert found.pop() == place
        if order.ended:
            found.append(place + 1)
    return found, order


@pytest.mark.parametrize(
    "cycle",
    [
        [CRITIC, MAKER],
        [CRITIC] * 5 + [MAKER],
        [MAKER] + [CRITIC] * 5,
        [CRITIC, MAKER, MAKER],
        [CRITIC, MAKER, CRITIC],
    ],
)
def test_a_cycle_is_one_iteration_from_its_second_time_on(cycle: list[int]) -> None:
    found, order = ends(cycle * 6)
    assert found == [len(cycle) * n for n in range(2, 7)], "the first is not known to be over yet"
    assert order.completed == 6


def test_optimizers_that_step_on_one_backward_end_an_iteration_at_once() -> None:
    found, order = ends([0, 1] * 4, together=True)
    assert found == [2, 4, 6, 8]
    assert order.completed == 4


def test_one_optimizer_ends_an_iteration_with_each_step() -> None:
    order = IterationOrder(1)
    for attempt in range(5):
        order.step(0, attempt)
        assert order.ended
    assert order.completed == 5


def test_a_generator_that_steps_every_fifth_iteration_is_never_left_behind() -> None:
    steps = [k for i in range(40) for k in ([CRITIC, MAKER] if i % 5 == 0 else [CRITIC])]
    found, _ = ends(steps)
    assert len(found) > 4
    for place in found:
        assert place == len(steps) or steps[place] == CRITIC, "the next step begins an iteration"


def test_steps_that_come_now_and_then_are_waited_for() -> None:
    """As in lazy regularisation: each optimizer has a second step in some iterations."""
    each = [[MAKER] * (1 + (i % 4 == 0)) + [CRITIC] * (1 + (i % 16 == 0)) for i in range(64)]
    true = list(itertools.accumulate(map(len, each)))
    found, order = ends(itertools.chain(*each))
    assert set(found) <= set(true)
    assert len(found) > len(true) / 2
    assert order.completed == 64


def test_one_optimizer_that_steps_alone_for_long_counts_by_itself_until_the_other_joins_in() -> None:
    found, order = ends([CRITIC] * 100 + [CRITIC, MAKER] * 10)
    assert order.completed == 110
    assert found[-9:] == list(range(104, 121, 2)), "and the critic's step before the first of the maker's ended nothing"
    assert 101 not in found


def test_without_any_order_every_step_counts_in_the_end() -> None:
    chance = random.Random(0)
    order = IterationOrder(3)
    for attempt in range(3000):
        order.step(chance.choice([0, 1, 2]), attempt)
    assert order.ended
    assert order.completed > 100


def test_steps_that_loss_scaling_skips_do_not_shift_the_iterations() -> None:
    found, order = ends([None, None, CRITIC, MAKER, CRITIC, MAKER, None, MAKER, CRITIC, None, CRITIC, MAKER])
    assert found == [4, 6, 8, 10, 12]
    assert order.completed == 6


def test_the_order_is_known_again_after_a_resume() -> None:
    _, before = ends(([CRITIC] * 5 + [MAKER]) * 3)
    after = IterationOrder(2)
    after.load_state_dict(before.state_dict())
    over = []
    for attempt, k in enumerate(([CRITIC] * 5 + [MAKER]) * 2):
        after.step(k, attempt)
        over.append(after.ended)
    assert over == ([False] * 5 + [True]) * 2
    assert after.completed == 2


def test_what_was_never_recognised_is_not_known_after_a_resume_either() -> None:
    _, before = ends([CRITIC, CRITIC, MAKER])
    after = IterationOrder(2)
    after.load_state_dict(before.state_dict())
    after.step(CRITIC, 0)
    after.step(MAKER, 1)
    assert not after.ended
