"""Gradients that the loop never zeroes are found, without false alarms."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot

Attach = Callable[..., surefoot.Guard]
Read = Callable[[], surefoot.Run]
STEPS = 12
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")


class Bag(nn.Module):
    """Embeddings with sparse gradients and a dense layer on top of them."""

    def __init__(self, *, both: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8, sparse=True)
        self.other = nn.Embedding(20, 8, sparse=True) if both else None
        self.last = nn.Linear(8, 1)

    def forward(self, tokens: Tensor, *, other: bool = False) -> Tensor:
        table = self.other if other and self.other is not None else self.table
        return self.last(table(tokens).mean(1))[:, 0]


def tokens(i: int) -> Tensor:
    return torch.randint(0, 20, (6, 5), generator=torch.Generator().manual_seed(i))


def loss_of(model: Bag, i: int, **options: bool) -> Tensor:
    return (model(tokens(i), **options) - tokens(i).float().mean(1) / 10).square().mean()


def findings_and_decisions(run: surefoot.Run) -> list[str]:
    """Details of all stale-gradient findings and reasons of all decisions."""
    findings = [e["detail"] for e in run.events if e["kind"] == "finding" and e["detector"] == "stale_grads"]
    return findings + [e["reason"] for e in run.events if e["kind"] == "decision"]


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "SparseAdam"])
def test_untrained_layers_have_no_stale_gradients(name: str, to_none: bool, attach: Attach, read: Read) -> None:
    """The dense layer has gradients too, but belongs to no optimizer and is never zeroed."""
    torch.manual_seed(0)
    model = Bag()
    optimizer = getattr(torch.optim, name)(model.table.parameters(), lr=0.01)
    guard = attach(model, optimizer)
    for i in range(STEPS):
        guard.watch(loss_of(model, i), tokens(i)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    guard.close()
    assert guard.step == STEPS
    assert set(read().scalars["stale_grads"].tolist()[1:]) == {0.0}
    assert findings_and_decisions(read()) == []


@pytest.mark.parametrize("to_none", [True, False])
def test_alternating_tables_have_no_stale_gradients(to_none: bool, attach: Attach, read: Read) -> None:
    """In every other batch a table has no gradient, or one that was zeroed."""
    torch.manual_seed(0)
    model = Bag(both=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = attach(model, optimizer)
    for i in range(STEPS):
        guard.watch(loss_of(model, i, other=i % 2 == 1), tokens(i)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)
    guard.close()
    assert set(read().scalars["stale_grads"].tolist()[1:]) == {0.0}
    assert findings_and_decisions(read()) == []


def _new_blocks(params: list[Tensor]) -> Iterator[Tensor]:
    """Allocate memory, so that new gradients cannot reuse the old addresses."""
    for p in params:
        yield torch.empty_like(p)


@pytest.mark.parametrize("elsewhere", [True, False])
def test_unwatched_backward_before_the_watched_one_is_not_stale(elsewhere: bool, attach: Attach, read: Read) -> None:
    """The gradients were zeroed, so those of the first backward are new, at the old addresses or not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = attach(model, optimizer)
    for i in range(STEPS):
        optimizer.zero_grad()
        blocks = list(_new_blocks(list(model.parameters()))) if elsewhere else []
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(i))
        (0.01 * sum(p.square().sum() for p in model.parameters())).backward()
        guard.watch((model(x)[:, 0] - x.sum(1)).square().mean(), x).backward()
        optimizer.step()
        del blocks
        gc.collect()
    guard.close()
    assert set(read().scalars["stale_grads"].tolist()[1:]) == {0.0}
    assert not any("not zeroed" in words for words in findings_and_decisions(read()))


def test_gradients_zeroed_in_place_without_a_version_change(attach: Attach, read: Read) -> None:
    """As a custom kernel does: the same tensor without a new version."""
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = attach(model, optimizer)
    for i in range(STEPS):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(i))
        guard.watch((model(x)[:, 0] - x.sum(1)).square().mean(), x).backward()
        optimizer.step()
        for p in model.parameters():
            assert p.grad is not None
            p.grad.numpy().fill(0.0)
    guard.close()
    assert set(read().scalars["stale_grads"].tolist()[1:]) == {0.0}


@pytest.mark.parametrize("build", ["dense", "sparse", "first without a gradient"])
def test_stale_gradients_are_found(build: str, attach: Attach, read: Read) -> None:
    torch.manual_seed(0)
    model: Any = Bag(both=build == "first without a gradient")
    if build == "dense":
        model.table = nn.Embedding(20, 8)
    params = [*model.table.parameters(), *model.last.parameters()]
    params = [*model.other.parameters(), *params] if build == "first without a gradient" else params
    optimizer = torch.optim.SGD(params, lr=1e-4)
    guard = attach(model, optimizer, policy="observe")
    for i in range(6):
        guard.watch(loss_of(model, i), tokens(i)).backward()
        optimizer.step()
    guard.close()
    assert read().scalars["stale_grads"].tolist()[1:] == [1.0] * 5
    assert any("not zeroed" in words for words in findings_and_decisions(read()))
