"""Optimizer states that are wrapper tensor subclasses: captured, restored, saved and loaded."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import surefoot


class Tensor8bit(Tensor):
    """An 8-bit tensor: integer codes and one scale."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, shape: Any) -> Any:
        return Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor, shape: Any) -> None:
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], {"coded": True}

    @classmethod
    def __tensor_unflatten__(cls, parts: Any, context: Any, size: Any = None, stride: Any = None) -> Tensor8bit:
        assert context == {"coded": True}
        return cls(parts["codes"], parts["scale"], size)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} is not for tensors in 8 bits")

    def decoded(self) -> Tensor:
        return self.codes.float() * self.scale

    def encode(self, value: Tensor) -> None:
        self.scale.copy_(value.abs().amax().clamp(min=1e-12) / 127)
        self.codes.copy_((value / self.scale).round().to(torch.int8))


class Momentum8bit(Optimizer):
    """SGD with momentum in 8 bits."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = Tensor8bit(torch.zeros(p.shape, dtype=torch.int8), torch.zeros(()), p.shape)
                state["momentum"].encode(0.9 * state["momentum"].decoded() + p.grad)
                p.sub_(group["lr"] * state["momentum"].decoded())


def train(model: nn.Module, optimizer: Optimizer, watch: Callable[..., Tensor], steps: range, bad: int = -1) -> None:
    for i in steps:
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(i))
        x = x * float("nan") if i == bad else x
        watch((model(x) - 1).square().mean(), x).backward()
        optimizer.step()
        optimizer.zero_grad()


def contents(model: nn.Module, optimizer: Optimizer) -> list[Tensor]:
    tensors = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        for value in optimizer.state[p].values():
            parts = [getattr(value, n) for n in value.__tensor_flatten__()[0]] if hasattr(value, "codes") else [value]
            tensors += [part.clone() for part in parts]
    return tensors


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 1))


def torchao(name: str) -> Callable[..., Optimizer]:
    pytest.importorskip("torchao", reason="torchao is not installed")
    return getattr(importlib.import_module("torchao.optim"), name)


def build(name: str, model: nn.Module) -> Optimizer:
    optimizer_class = Momentum8bit if name == "Momentum8bit" else torchao(name)
    return optimizer_class(model.parameters())


NAMES = ["Momentum8bit", "AdamW8bit", "AdamW4bit", "AdamWFp8"]
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", NAMES)
def test_guard_stays_enabled_and_state_is_restored_in_place(name: str, attach: Any, read: Any) -> None:
    model = net()
    optimizer = build(name, model)
    guard = attach(model, optimizer, policy=surefoot.Policy(snapshot_every=2))
    train(model, optimizer, guard.watch, range(4))
    train_state = guard._recovery._train_state
    copy = train_state.capture()
    expected = contents(model, optimizer)
    ids_before = [id(v) for state in optimizer.state.values() for v in state.values() if type(v) is not Tensor]
    train(model, optimizer, guard.watch, range(4, 8), bad=6)
    assert not all(map(torch.equal, expected, contents(model, optimizer)))
    train_state.restore(copy)
    assert all(map(torch.equal, expected, contents(model, optimizer)))
    ids_after = [id(v) for state in optimizer.state.values() for v in state.values() if type(v) is not Tensor]
    assert ids_before == ids_after, "in place"
    guard.close()
    assert not [e for e in read().events if e.get("name") == "degraded"]
    assert read().scalars["verdict"].tolist() == [0, 0, 0, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("name", NAMES)
def test_resumed_run_has_the_same_state(name: str, attach: Any, read: Any) -> None:
    model = net()
    optimizer = build(name, model)
    guard = attach(model, optimizer, resume=True)
    train(model, optimizer, guard.watch, range(5))
    guard.close()
    saved = contents(model, optimizer)
    assert not [e for e in read().events if e.get("name") == "left_out"]
    other_model = net()
    other_optimizer = build(name, other_model)
    guard = attach(other_model, other_optimizer, resume=True)
    assert guard.step == 5
    assert all(map(torch.equal, saved, contents(other_model, other_optimizer)))
    train(model, optimizer, lambda loss, batch: loss, range(5, 8))
    train(other_model, other_optimizer, guard.watch, range(5, 8))
    assert all(map(torch.equal, contents(model, optimizer), contents(other_model, other_optimizer)))
