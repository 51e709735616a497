"""The order of samples and the position in it: no sample is lost or repeated, whatever changes in between."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections import Counter
from itertools import permutations
from math import factorial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.data import Sampler, WrongPosition
from surefoot.data.epoch_order import EpochOrder

SIZES = st.integers(1, 60)
GOLDEN = {
    5: [0, 3, 1, 4, 2],
    1000000: [561620, 553451, 985491, 728362, 626100],
    1000000000000: [349350292955, 496357752530, 622495364870, 676904965055, 717541290013],
}
fewer_examples = settings(max_examples=50, deadline=None)


def epochs(sampler: Sampler, count: int) -> list[list[int]]:
    return [batch for _ in range(count) for batch in sampler]


def through_json(sampler: Sampler) -> Any:
    return json.loads(json.dumps(sampler.state_dict()))


def ranks(length: int, batch_size: int, world_size: int, **options: Any) -> list[Sampler]:
    return [Sampler(length, batch_size, seed=5, rank=r, world_size=world_size, **options) for r in range(world_size)]


def steps(world: list[Sampler], most: int | None = None) -> list[list[list[int]]]:
    """The batches of all ranks step by step, until the epoch ends or `most` steps are done."""
    loops = [iter(sampler) for sampler in world]
    batches_by_step: list[list[list[int]]] = []
    while most is None or len(batches_by_step) < most:
        step = [next(loop, None) for loop in loops]
        assert (None in step) == all(batch is None for batch in step), "ranks disagree about the end of the epoch"
        if None in step:
            break
        batches_by_step.append(step)  # pyright: ignore[reportArgumentType]
    assert len({json.dumps(sampler.state_dict()) for sampler in world}) == 1
    return batches_by_step


def flat(batches_by_step: list[list[list[int]]]) -> list[int]:
    return [sample for step in batches_by_step for share in step for sample in share]


# -- the order


@settings(max_examples=20, deadline=None)
@given(length=st.one_of(st.integers(1, 300), st.integers(65_530, 65_550), st.sampled_from([2**18, 2**18 - 1, 300_007])))
def test_every_sample_has_one_position(length: int) -> None:
    order = EpochOrder(length, seed=1, epoch=2, shuffle=True)
    places = np.arange(length)
    samples = order.samples(places)
    assert np.array_equal(np.sort(samples), places)
    assert np.array_equal(order.places(samples), places)


def test_the_order_never_changes() -> None:
    """With another order, a resumed run would repeat samples."""
    orders = {
        n: EpochOrder(n, seed=7, epoch=3, shuffle=True).samples(np.arange(5)).tolist() for n in (5, 10**6, 10**12)
    }
    assert orders == GOLDEN


def test_small_orders_are_equally_likely() -> None:
    trials = 6000
    for n in (3, 4):
        seen = Counter(
            tuple(EpochOrder(n, seed=i // 60, epoch=i % 60, shuffle=True).samples(np.arange(n)).tolist())
            for i in range(trials)
        )
        expected = trials / factorial(n)
        chi_square = sum((seen[p] - expected) ** 2 / expected for p in permutations(range(n)))
        assert chi_square < 3 * factorial(n)


def test_large_orders_are_well_mixed() -> None:
    """Neighbouring samples are spread out, in every epoch."""
    n = 1_000_000
    for epoch in range(3):
        samples = EpochOrder(n, seed=0, epoch=epoch, shuffle=True).samples(np.arange(100_000)).astype(float)
        assert abs(np.corrcoef(samples[:-1], samples[1:])[0, 1]) < 0.02
        assert np.histogram(samples, bins=20, range=(0, n))[0] == pytest.approx(5000, rel=0.1)


def test_a_billion_samples_take_no_memory_and_access_is_fast() -> None:
    sampler = Sampler(10**9, 4, seed=0)
    sampler.load_state_dict({**sampler.state_dict(), "cursor": 10**9 - 6})
    assert [len(batch) for batch in sampler] == [4, 2]


def test_seed_and_epoch_decide_the_order_and_nothing_else() -> None:
    first, again, other = Sampler(50, 50, seed=1), Sampler(50, 50, seed=1), Sampler(50, 50, seed=2)
    assert epochs(first, 3) == epochs(again, 3)
    first_epoch, second_epoch, _ = (tuple(batch) for batch in epochs(Sampler(50, 50, seed=1), 3))
    assert first_epoch != second_epoch
    assert epochs(other, 1) != [list(first_epoch)]
    later = Sampler(50, 50, seed=1)
    later.set_epoch(1)
    assert epochs(later, 1) == [list(second_epoch)]


def test_without_shuffling_samples_are_in_order() -> None:
    assert epochs(Sampler(7, 3, seed=0, shuffle=False), 2) == [[0, 1, 2], [3, 4, 5], [6]] * 2


def test_the_last_batch_is_smaller_or_left_out() -> None:
    assert [len(b) for b in Sampler(11, 4, seed=0)] == [4, 4, 3]
    assert [len(b) for b in Sampler(11, 4, seed=0, drop_last=True)] == [4, 4]
    assert len(Sampler(11, 4, seed=0)) == 3
    assert len(Sampler(11, 4, seed=0, drop_last=True)) == 2


# -- stopped and resumed


@fewer_examples
@given(length=SIZES, batch_size=st.integers(1, 12), cut=st.integers(0, 80), drop_last=st.booleans(), data=st.data())
def test_a_resumed_sampler_yields_the_same_batches(
    length: int, batch_size: int, cut: int, drop_last: bool, data: st.DataObject
) -> None:
    options: dict[str, Any] = {"seed": 3, "shuffle": data.draw(st.booleans()), "drop_last": drop_last}
    if drop_last and length < batch_size:
        return
    expected = epochs(Sampler(length, batch_size, **options), 4)
    sampler = Sampler(length, batch_size, **options)
    seen: list[list[int]] = []
    while len(seen) < min(cut, len(expected)):
        for batch in sampler:
            seen.append(batch)
            if len(seen) == cut:
                break
    resumed = Sampler(length, batch_size, **options)
    resumed.load_state_dict(through_json(sampler))
    seen += epochs(resumed, 4 - resumed.epoch)
    assert seen == expected


def test_a_state_saved_at_the_last_batch_ends_the_epoch_first() -> None:
    sampler = Sampler(4, 2, seed=0)
    loop = iter(sampler)
    next(loop), next(loop)
    saved = through_json(sampler)
    assert (saved["epoch"], saved["cursor"]) == (0, 4)
    resumed = Sampler(4, 2, seed=0)
    resumed.load_state_dict(saved)
    assert list(resumed) == []
    assert resumed.epoch == 1
    assert len(list(resumed)) == 2


def test_setting_the_current_epoch_keeps_the_position() -> None:
    sampler = Sampler(10, 2, seed=0)
    loop = iter(sampler)
    next(loop)
    sampler.set_epoch(0)
    assert sampler.state_dict()["cursor"] == 2
    sampler.set_epoch(4)
    assert (sampler.epoch, sampler.state_dict()["cursor"]) == (4, 0)


# -- several ranks


@pytest.mark.filterwarnings("ignore:.* samples are left in the epoch")
@fewer_examples
@given(length=st.integers(8, 90), draws=st.data())
def test_the_number_of_ranks_may_change_without_losing_samples(length: int, draws: st.DataObject) -> None:
    seen: list[int] = []
    state = None
    for _ in range(draws.draw(st.integers(1, 4))):
        world = ranks(length, draws.draw(st.integers(1, 5)), draws.draw(st.sampled_from([1, 2, 4])))
        for sampler in world:
            if state is not None:
                sampler.load_state_dict(state)
        seen += flat(steps(world, draws.draw(st.integers(0, 4))))
        state = through_json(world[0])
        if state["epoch"]:
            break
    if not state["epoch"]:
        (last,) = ranks(length, 3, 1)
        last.load_state_dict(state)
        seen += [sample for batch in last for sample in batch]
    order = flat(steps(ranks(length, 1, 1)))
    assert list(dict.fromkeys(seen)) == order
    assert len(seen) - len(order) <= 3  # fewer samples were left than there are ranks


@fewer_examples
@given(length=SIZES, batch_size=st.integers(1, 6), world_size=st.sampled_from([1, 2, 3, 4, 7]))
def test_ranks_share_every_sample_and_always_have_one(length: int, batch_size: int, world_size: int) -> None:
    if length < world_size:
        with pytest.raises(ValueError, match="a step needs at least"):
            ranks(length, batch_size, world_size)
        return
    batches_by_step = steps(ranks(length, batch_size, world_size))
    assert sorted(flat(batches_by_step)) == list(range(length))
    assert len(batches_by_step) == len(ranks(length, batch_size, world_size)[0])
    for step in batches_by_step:
        sizes = [len(share) for share in step]
        assert min(sizes) >= 1
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= batch_size + (step is batches_by_step[-1])


def test_the_global_batch_does_not_depend_on_the_number_of_ranks() -> None:
    one_rank, two_ranks, four_ranks = (
        [flat([step]) for step in steps(ranks(53, batch_size, world_size))]
        for batch_size, world_size in ((8, 1), (4, 2), (2, 4))
    )
    assert one_rank == two_ranks == four_ranks


def test_with_fewer_samples_than_ranks_left_some_repeat_with_a_warning() -> None:
    (alone,) = ranks(10, 4, 1)
    steps([alone], 2)
    world = ranks(10, 1, 4)
    for sampler in world:
        sampler.load_state_dict(through_json(alone))
    with pytest.warns(UserWarning, match="2 samples are left in the epoch for 4 ranks"):
        batches_by_step = steps(world)
    assert [len(share) for share in batches_by_step[0]] == [1, 1, 1, 1]
    assert len(batches_by_step) == 1
    assert len(set(flat(batches_by_step))) == 2


# -- banned samples


@fewer_examples
@given(length=st.integers(4, 60), batch_size=st.integers(1, 6), cut=st.integers(0, 10), data=st.data())
def test_banned_samples_are_skipped_and_the_others_keep_their_order(
    length: int, batch_size: int, cut: int, data: st.DataObject
) -> None:
    banned = data.draw(st.sets(st.integers(0, length - 1), min_size=1, max_size=length - 2))
    world_size = data.draw(st.sampled_from([1, 2]))
    order = flat(steps(ranks(length, 1, 1)))
    world = ranks(length, batch_size, world_size)
    loops = [iter(sampler) for sampler in world]
    before = [[next(loop) for loop in loops] for _ in range(min(cut, len(world[0]) - 1))]
    for sampler in world:
        sampler.ban(banned)
    if data.draw(st.booleans()):
        state = through_json(world[0])
        world = ranks(length, batch_size, world_size)
        for sampler in world:
            sampler.load_state_dict(state)
        loops = [iter(sampler) for sampler in world]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        remaining = [list(step) for step in zip(*loops, strict=True)]
    seen = len(flat(before))
    assert flat(before) == order[:seen]
    assert list(dict.fromkeys(flat(remaining))) == [i for i in order[seen:] if i not in banned]
    assert not banned & set(flat(steps(world)))


def test_a_ban_takes_effect_with_the_next_batch() -> None:
    sampler = Sampler(9, 3, seed=0, shuffle=False)
    loop = iter(sampler)
    assert next(loop) == [0, 1, 2]
    sampler.ban([1, 4])
    assert list(loop) == [[3, 5, 6], [7, 8]]
    assert list(sampler) == [[0, 2, 3], [5, 6, 7], [8]]
    assert sampler.state_dict()["banned"] == [1, 4]


def test_an_invalid_ban_is_refused() -> None:
    sampler = Sampler(4, 2, seed=0)
    with pytest.raises(ValueError, match="numbered from 0 to 3"):
        sampler.ban([2, 4])
    with pytest.raises(ValueError, match="there would be no batch at all"):
        sampler.ban(range(4))
    assert sampler.state_dict()["banned"] == []


# -- states that do not fit


GOOD = Sampler(10, 2, seed=1).state_dict()
BAD: list[tuple[Any, str]] = [
    (None, "expected a state of kind"),
    ({}, "a mapping with no keys"),
    ({"_snapshot": 1, "_steps_since_snapshot": 0}, "belongs to another loader"),
    ({**GOOD, "version": 2}, "reads version 1"),
    ({**GOOD, "length": 11}, "saved with length=11, here it is 10"),
    ({**GOOD, "seed": 2}, "Pass the seed of the saved run"),
    ({**GOOD, "shuffle": False}, "the same shuffle="),
    ({**GOOD, "shuffle": 1}, "shuffle is 1"),
    ({**GOOD, "cursor": 11}, "cursor is 11, not a whole number from 0 to 10"),
    ({**GOOD, "cursor": True}, "cursor is True"),
    ({**GOOD, "cursor": 2.0}, "cursor is 2.0"),
    ({**GOOD, "epoch": -1}, "epoch is -1"),
    ({**GOOD, "epoch": 1 << 70}, "epoch is"),
    ({k: v for k, v in GOOD.items() if k != "epoch"}, "epoch is None"),
    ({**GOOD, "banned": [10]}, "not a list of samples below 10"),
    ({**GOOD, "banned": "12"}, "not a list of samples"),
    ({**GOOD, "banned": list(range(10))}, "every sample is banned"),
]


@pytest.mark.parametrize(("state", "message"), BAD, ids=[message for _, message in BAD])
def test_a_state_that_is_damaged_or_of_other_data_is_refused(state: Any, message: str) -> None:
    sampler = Sampler(10, 2, seed=1)
    before = sampler.state_dict()
    with pytest.raises(WrongPosition, match=message):
        sampler.load_state_dict(state)
    assert sampler.state_dict() == before


@fewer_examples
@given(st.recursive(st.none() | st.integers() | st.floats() | st.text(), lambda x: st.lists(x, max_size=3)), st.data())
def test_any_damaged_field_raises_wrong_position(value: Any, data: st.DataObject) -> None:
    sampler = Sampler(10, 2, seed=1)
    state = {**GOOD, data.draw(st.sampled_from(sorted(GOOD))): value}
    with contextlib.suppress(WrongPosition):
        sampler.load_state_dict(state)
    assert all(0 <= sample < 10 for batch in sampler for sample in batch)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"world_size": 2, "rank": 2}, "rank 2 is out of range"),
        ({"seed": -1}, "seed must be"),
        ({"dataset": 0}, "0 samples"),
        ({"drop_last": True, "batch_size": 11}, "there would be no batch at all"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampler(**{"dataset": 10, "batch_size": 2, "seed": 0, **options})
