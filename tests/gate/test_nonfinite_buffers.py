"""A batch that makes a buffer non-finite is refused; a buffer that is meant to be non-finite is ignored."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import surefoot

Attach = Callable[..., surefoot.Guard]
Read = Callable[[], surefoot.Run]
OPTIMIZERS = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adamax", "Adadelta", "Adagrad", "Rprop")


class Net(nn.Module):
    """Two batch norms on the input, so that one large value reaches only their statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.BatchNorm1d(4)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([self.norm(x), self.second(x)], 1))[:, 0]


def batch(i: int, *, bad: bool = False) -> Tensor:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(i))
    if bad:
        x[0, 0] = 1e30
    return x


def train(model: nn.Module, optimizer: Any, guard: surefoot.Guard, i: int, *, bad: bool = False) -> None:
    x = batch(i, bad=bad)
    guard.watch(model(x).square().mean(), x).backward()
    optimizer.step()
    optimizer.zero_grad()


def finite(model: nn.Module) -> bool:
    return all(bool(b.isfinite().all()) for b in model.buffers())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_infinite_running_variance_is_refused_and_named(name: str, attach: Attach, read: Read) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3)
    guard = attach(model, optimizer)
    for i in range(8):
        train(model, optimizer, guard, i, bad=i == 4)
    guard.close()
    assert finite(model)
    assert bool(model.eval()(batch(99)).isfinite().all()), "evaluation still works"
    run = read()
    assert run.scalars["verdict"].tolist() == [0, 0, 0, 0, 1, 0, 0, 0]
    assert run.scalars["nonfinite_buffers"].tolist() == [0, 0, 0, 0, 2, 0, 0, 0]
    refused = [e for e in run.events if e.get("action") == "refuse"]
    assert [e["reason"] for e in refused] == ["the batch made buffer norm.running_var and 1 more non-finite"]
    buffers = next(e["values"]["buffers"] for e in run.events if e.get("name") == "buffers")
    assert [b["name"] for b in buffers] == ["norm.running_var", "second.running_var"]


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("bad_index", [0, 2])
def test_one_bad_microbatch_of_an_accumulated_update(bad_index: int, scaled: bool, attach: Attach, read: Read) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    guard = attach(model, optimizer, scaler=scaler)
    for i in range(4):
        before = [t.clone() for t in model.state_dict().values()]
        for m in range(3):
            x = batch(3 * i + m, bad=i == 2 and m == bad_index)
            scaler.scale(guard.watch(model(x).square().mean() / 3, x)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if i == 2:
            assert all(map(torch.equal, before, model.state_dict().values()))
    guard.close()
    assert finite(model)
    assert read().scalars["verdict"].tolist() == [0, 0, 1, 0]


def test_line_search_that_makes_a_buffer_nonfinite_is_reverted(attach: Attach, read: Read) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    guard = attach(model, optimizer)
    before: list[Tensor] = []
    for i in range(4):
        calls: list[int] = []

        def closure(i: int = i, calls: list[int] = calls) -> Tensor:
            optimizer.zero_grad()
            calls.append(i)
            loss = guard.watch(model(batch(i, bad=i == 2 and len(calls) == 2)).square().mean(), None)
            loss.backward()
            return loss

        before = [t.clone() for t in model.state_dict().values()] if i == 2 else before
        optimizer.step(closure)
        if i == 2:
            assert len(calls) > 1
            assert all(map(torch.equal, before, model.state_dict().values()))
    guard.close()
    assert read().scalars["verdict"].tolist() == [0, 0, 1, 0]


class BufferModel(nn.Module):
    """Changes its buffer in each forward pass as the test says."""

    def __init__(self, start: Tensor, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.register_buffer("held", start)
        self.last = nn.Linear(4, 1)
        self._change = change

    def forward(self, x: Tensor) -> Tensor:
        self._change(self)
        return self.last(x)[:, 0]


def _mask(model: Any) -> None:
    model.held.copy_(torch.full((3, 3), -math.inf).triu(1))


def _longer_mask(model: Any) -> None:
    model.held = torch.full((len(model.held) + 1,), math.inf)


INTENDED = {
    "mask of -inf, created in the first forward": (torch.zeros(3, 3), _mask),
    "mask of -inf, written again each time": (torch.full((3, 3), -math.inf).triu(1), _mask),
    "NaN as a placeholder": (torch.full((3,), math.nan), lambda model: model.held.add_(1)),
    "cache that grows": (torch.zeros(2), _longer_mask),
    "integers": (torch.zeros(3, dtype=torch.int64), lambda model: model.held.add_(1)),
}


@pytest.mark.parametrize("case", INTENDED)
def test_intentionally_nonfinite_buffers_are_accepted(case: str, attach: Attach, read: Read) -> None:
    start, change = INTENDED[case]
    model = BufferModel(start.clone(), change)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = attach(model, optimizer)
    for i in range(6):
        train(model, optimizer, guard, i)
    guard.close()
    assert read().scalars["verdict"].tolist() == [0] * 6


def test_buffer_that_stays_infinite_is_accepted_as_intended(
    attach: Attach, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    model = BufferModel(torch.zeros(2), lambda model: model.held.fill_(math.inf))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = attach(model, optimizer)
    for i in range(12):
        train(model, optimizer, guard, i)
    guard.close()
    verdicts = read().scalars["verdict"].tolist()
    assert 3 <= sum(verdicts) <= 5
    assert verdicts[-6:] == [0] * 6
    assert "buffer held became non-finite in 3 updates in a row" in caplog.text


def test_buffer_replaced_in_each_forward_is_checked(attach: Attach, read: Read) -> None:
    values = iter([1.0, 2.0, math.nan, 3.0])

    def replace(model: Any) -> None:
        model.held = model.held * 0.9 + next(values)

    model = BufferModel(torch.zeros(2), replace)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = attach(model, optimizer)
    for i in range(4):
        train(model, optimizer, guard, i)
    guard.close()
    assert read().scalars["verdict"].tolist() == [0, 0, 1, 0]
    assert model.get_buffer("held").tolist() == pytest.approx([5.61, 5.61])
