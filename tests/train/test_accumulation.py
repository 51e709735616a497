from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from surefoot.train.accumulation import MicroBatchGroups, sum_weight

IGNORED = -100


def test_all_groups_but_the_last_are_full() -> None:
    groups = list(MicroBatchGroups(range(10), 4))
    assert [list(group) for group in groups] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [group.partial for group in groups] == [False, False, True]


def test_divisible_batches_leave_no_partial_group() -> None:
    assert [group.partial for group in MicroBatchGroups(range(8), 4)] == [False, False]


def test_batches_are_fetched_lazily() -> None:
    fetched: list[int] = []

    def batches() -> Iterator[int]:
        for number in range(10):
            fetched.append(number)
            yield number

    groups = MicroBatchGroups(batches(), 3)
    next(groups)
    assert fetched == [0, 1, 2]


def test_accumulate_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"batch\.accumulate"):
        MicroBatchGroups([1, 2], 0)


def _batch(tokens: int) -> tuple[Tensor, Tensor]:
    """Twelve positions of which `tokens` have a target."""
    targets = torch.randint(0, 5, (12,))
    targets[tokens:] = IGNORED
    return torch.randn(12, 8), targets


def _gradients(model: nn.Module) -> list[Tensor]:
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return grads


@pytest.mark.parametrize("token_counts", [[12, 12, 12, 12], [12, 1, 7, 3], [5, 12], [3, 0, 4]])
def test_accumulated_gradients_equal_those_of_one_batch(token_counts: list[int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5)).double()
    batches = [(x.double(), y) for x, y in map(_batch, token_counts)]
    cross_entropy(
        model(torch.cat([x for x, _ in batches])), torch.cat([y for _, y in batches]), ignore_index=IGNORED
    ).backward()
    expected = _gradients(model)
    for group in MicroBatchGroups(batches, 4):
        counts = [int((y != IGNORED).sum()) for _, y in group]
        for x, y in group:
            total = cross_entropy(model(x), y, ignore_index=IGNORED, reduction="sum")
            (total * sum_weight(sum(counts))).backward()
    torch.testing.assert_close(_gradients(model), expected)


def test_ranks_with_different_token_counts_average_to_one_batch() -> None:
    token_counts = [[4, 1], [12, 7]]  # token counts of two ranks
    total = sum(map(sum, token_counts))
    weight = sum_weight(total, ranks=2)
    assert sum(weight * count for counts in token_counts for count in counts) / 2 == pytest.approx(1)


def test_group_without_targets_has_weight_zero() -> None:
    assert sum_weight(0) == 0
