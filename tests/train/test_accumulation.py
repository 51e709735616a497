from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from surefoot.train.accumulation import MicroBatchGroups, sum_weight

NOTHING = -100


def test_a_group_is_full_but_for_the_last_one() -> None:
    groups = list(MicroBatchGroups(range(10), 4))
    assert [list(group) for group in groups] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [group.partial for group in groups] == [False, False, True]


def test_batches_that_go_in_evenly_leave_no_partial_group() -> None:
    assert [group.partial for group in MicroBatchGroups(range(8), 4)] == [False, False]


def test_no_batch_is_fetched_before_its_group_is_asked_for() -> None:
    fetched: list[int] = []

    def batches() -> Iterator[int]:
        for number in range(10):
            fetched.append(number)
            yield number

    groups = MicroBatchGroups(batches(), 3)
    next(groups)
    assert fetched == [0, 1, 2]


def test_a_group_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"batch\.accumulate"):
        MicroBatchGroups([1, 2], 0)


def _batch(tokens: int) -> tuple[Tensor, Tensor]:
    """Twelve places of which `tokens` count."""
    targets = torch.randint(0, 5, (12,))
    targets[tokens:] = NOTHING
    return torch.randn(12, 8), targets


def _gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


@pytest.mark.parametrize("held", [[12, 12, 12, 12], [12, 1, 7, 3], [5, 12], [3, 0, 4]])
def test_a_group_gives_the_gradients_of_one_big_batch(held: list[int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5)).double()
    batches = [(x.double(), y) for x, y in map(_batch, held)]
    cross_entropy(
        model(torch.cat([x for x, _ in batches])), torch.cat([y for _, y in batches]), ignore_index=NOTHING
    ).backward()
    expected = _gradients(model)
    for group in MicroBatchGroups(batches, 4):
        counts = [int((y != NOTHING).sum()) for _, y in group]
        for x, y in group:
            total = cross_entropy(model(x), y, ignore_index=NOTHING, reduction="sum")
            (total * sum_weight(sum(counts))).backward()
    torch.testing.assert_close(_gradients(model), expected)


def test_ranks_that_hold_different_numbers_of_tokens_average_to_one_big_batch() -> None:
    held = [[4, 1], [12, 7]]  # of two ranks
    total = sum(map(sum, held))
    share = sum_weight(total, ranks=2)
    assert sum(share * count for counts in held for count in counts) / 2 == pytest.approx(1)


def test_a_group_in_which_nothing_counts_changes_nothing() -> None:
    assert sum_weight(0) == 0
