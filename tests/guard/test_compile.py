"""Compiled models, and compiled loops around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from loops import Net, bare, batch, loss_of, net, same, snapshot, train
from torch import Tensor

import surefoot

Attach = Callable[..., Any]
Read = Callable[[], surefoot.Run]
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning:torch", "ignore::FutureWarning:torch"
)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: Net, backend: str = "aot_eager", **options: Any) -> Any:
    return torch.compile(model, backend=backend, **options)


def check(model: Net, run: Any, optimizer: torch.optim.Optimizer, guard: surefoot.Guard, read: Read) -> None:
    """Healthy steps are applied, a bad one leaves no trace, and the recorded norms are those of the gradients."""
    norms: list[float] = []
    for i in range(4):
        guard.watch(loss_of(run, batch(i)), batch(i)).backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item())
        optimizer.step()
        optimizer.zero_grad()
    before = snapshot(model, optimizer)
    train(run, optimizer, guard.watch, 4, "nan")
    assert same(before, snapshot(model, optimizer))
    train(run, optimizer, guard.watch, 5)
    guard.close()
    rows = read().scalars
    assert rows["verdict"].tolist() == [0, 0, 0, 0, 1, 0]
    assert rows["norm"][:4].tolist() == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("order", ["attach, compile", "compile, attach to it", "compile, attach to the model"])
def test_compiled_model_is_guarded(order: str, fused: bool, attach: Attach, read: Read) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    if order == "attach, compile":
        guard = attach(model, optimizer)
        run = compiled(model)
    else:
        run = compiled(model)
        guard = attach(run if order == "compile, attach to it" else model, optimizer)
    check(model, run, optimizer, guard, read)


@pytest.mark.parametrize("attach_to", ["model", "compiled"])
def test_guard_adds_no_graph_break(attach_to: str, attach: Attach, read: Read) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if attach_to == "model":
        guard = attach(model, optimizer)
        run = compiled(model, fullgraph=True)
    else:
        run = compiled(model, fullgraph=True)
        guard = attach(run, optimizer)
    check(model, run, optimizer, guard, read)


def test_inductor_backend(attach: Attach, read: Read) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    guard = attach(model, optimizer)
    check(model, compiled(model, backend="inductor"), optimizer, guard, read)


def test_close_leaves_a_compiled_model_unchanged(attach: Attach) -> None:
    model, other = net(), net()
    optimizer, plain = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, other))
    run, bare_run = compiled(model), compiled(other)
    guard = attach(model, optimizer)
    for i in range(3):
        train(run, optimizer, guard.watch, i)
        train(bare_run, plain, bare, i)
    guard.close()
    for i in range(3):
        train(run, optimizer, bare, i)
        train(bare_run, plain, bare, i)
    assert same(snapshot(model, optimizer), snapshot(other, plain))


def test_watch_inside_a_compiled_loss_function(attach: Attach, read: Read) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = attach(model, optimizer)

    @torch.compile(backend="aot_eager")
    def loss(x: Tensor) -> Tensor:
        return guard.watch(loss_of(model, x), x) * 1.0

    for i in range(3):
        loss(batch(i)).backward()
        optimizer.step()
        optimizer.zero_grad()
    guard.close()
    rows = read().scalars
    assert rows["verdict"].tolist() == [0, 0, 0]
    assert (rows["loss"] > 0).all()
