"""`surefoot.locate` names the operation that makes a non-finite value, and leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import surefoot
from surefoot.origin.passes import LocateFailed
from surefoot.origin_record import OriginKind


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Block(nn.Module):
    """A linear layer, then one function of its output."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.act = Act(function)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.act(self.first(x)))


class Act(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def mean_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).mean()


def attend(x: Tensor) -> Tensor:
    masked = torch.zeros(len(x), len(x), dtype=torch.bool)
    masked[2] = True
    scores = (x @ x.T).masked_fill(masked, -math.inf)
    return torch.softmax(scores, dim=-1) @ x


FORWARD: list[tuple[Callable[[Tensor], Tensor], OriginKind, str]] = [
    (attend, OriginKind.SOFTMAX_MASKED, "softmax"),
    (lambda x: torch.log(x * 0), OriginKind.LOG_OF_ZERO, "log"),
    (lambda x: torch.log(-x.abs() - 1), OriginKind.LOG_OF_NEGATIVE, "log"),
    (lambda x: x / (x * 0), OriginKind.DIVISION_BY_ZERO, "div"),
    (lambda x: torch.exp(x.abs() + 1000), OriginKind.EXP_OVERFLOW, "exp"),
    (lambda x: (x.abs() + 1e30) ** 2, OriginKind.SQUARE_OVERFLOW, "pow"),
    (lambda x: torch.sqrt(-x.abs() - 1), OriginKind.SQRT_OF_NEGATIVE, "sqrt"),
    (lambda x: (x.abs() + 1e6).half().float(), OriginKind.FLOAT16_OVERFLOW, "half"),
    (lambda x: F.layer_norm(x * 0, (4,), eps=0.0), OriginKind.ZERO_VARIANCE, "layer_norm"),
]
BACKWARD: list[tuple[Callable[[Tensor], Tensor], OriginKind, str]] = [
    (lambda x: torch.sqrt(x * 0), OriginKind.SQRT_AT_ZERO, "sqrt"),
    (lambda x: x * (x * 0).pow(2).sum().sqrt(), OriginKind.SQRT_AT_ZERO, "sqrt"),
    (lambda x: x * (x * 0).pow(0.5), OriginKind.SQRT_AT_ZERO, "pow"),
    (lambda x: x + torch.acos(torch.ones_like(x) + x * 0), OriginKind.INFINITE_SLOPE, "acos"),
]


@pytest.mark.parametrize(("function", "kind", "operation"), FORWARD)
def test_names_the_operation_in_forward(function: Any, kind: OriginKind, operation: str) -> None:
    origin = surefoot.locate(Block(function), torch.randn(5, 4), mean_loss)
    assert (origin.kind, origin.operation, origin.backward) == (kind, operation, False)
    assert (origin.module, origin.module_type) == ("act", "Act")
    assert origin.file == __file__
    assert operation in origin.code or origin.code.startswith(("(lambda", "scores"))


@pytest.mark.parametrize(("function", "kind", "operation"), BACKWARD)
def test_names_the_operation_in_backward(function: Any, kind: OriginKind, operation: str) -> None:
    origin = surefoot.locate(Block(function), torch.randn(5, 4), mean_loss)
    assert (origin.kind, origin.operation, origin.backward) == (kind, operation, True)
    assert (origin.module, origin.file) == ("act", __file__)
    assert origin.inputs
    assert "backward pass of" in origin.reason


def test_a_deliberate_mask_is_no_origin() -> None:
    def masked(x: Tensor) -> Tensor:
        causal = torch.triu(torch.full((len(x), len(x)), -math.inf), diagonal=1)
        return torch.softmax(x @ x.T + causal, dim=-1) @ x

    origin = surefoot.locate(Block(masked), torch.randn(5, 4), mean_loss)
    assert not origin
    assert origin.kind is OriginKind.NONE


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad / (ctx.saved_tensors[0] * 0)


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(x @ x.T, dim=-1) * (torch.arange(len(x)) != 2)[:, None]
        return weights / weights.sum(-1, keepdim=True) @ x


def padded(x: Tensor) -> Tensor:
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    return attention(x[None], x[None], x[None], key_padding_mask=torch.ones(1, len(x), dtype=torch.bool))[0][0]


def divided_in_place(x: Tensor) -> Tensor:
    x = x.clone()
    x /= 0
    return x


OUTSIDE = torch.tensor([1.0, math.nan, 1.0, 1.0])
OTHERS: list[tuple[Callable[[Tensor], Tensor], OriginKind, str]] = [
    (padded, OriginKind.SOFTMAX_MASKED, "multi_head_attention_forward"),
    (Attention(), OriginKind.ATTENTION_ZERO, "div"),
    (divided_in_place, OriginKind.DIVISION_BY_ZERO, "div"),
    (lambda x: (x * 0).log_(), OriginKind.LOG_OF_ZERO, "log"),
    (lambda x: x * 0 * math.inf, OriginKind.INVALID, "mul"),
    (lambda x: x * OUTSIDE, OriginKind.TENSOR, ""),
    (lambda x: x[x > 1e9].mean() + x, OriginKind.EMPTY_MEAN, "mean"),
    (lambda x: torch.where(x.abs() < 1e4, x, (x.abs() * 1e5).exp()), OriginKind.EXP_OVERFLOW, "exp"),
    (Doubled.apply, OriginKind.DIVISION_BY_ZERO, "div"),
]
"""Fused, in place, set by the code, from outside, in a branch not taken, in a backward pass of one's own."""


@pytest.mark.parametrize(("function", "kind", "operation"), OTHERS)
def test_other_ways_to_make_one(function: Any, kind: OriginKind, operation: str) -> None:
    origin = surefoot.locate(Block(function), torch.randn(5, 4), mean_loss)
    assert (origin.kind, origin.operation) == (kind, operation)
    assert origin.file == __file__


@pytest.mark.parametrize("set_item", [True, False])
def test_infinity_that_the_code_sets_and_the_loss_sees(*, set_item: bool) -> None:
    def masked(model: nn.Module, batch: Tensor) -> Tensor:
        out = model(batch).clone()
        if set_item:
            out[1] = math.inf
            return out.mean()
        return out.masked_fill(out > 0, math.inf).mean()

    origin = surefoot.locate(Block(lambda x: x), torch.randn(5, 4), masked)
    assert origin.kind is OriginKind.CONSTANT
    assert origin.code.startswith("out[1]" if set_item else "return out.masked_fill")


def test_passing_a_value_on_is_not_making_it() -> None:
    model = Block(lambda x: x)
    batch = torch.randn(5, 4)
    batch[3, 1] = math.nan
    origin = surefoot.locate(model, batch, mean_loss)
    assert (origin.kind, origin.tensor) == (OriginKind.BATCH, "tensor 0 of the batch")
    with torch.no_grad():
        model.last.weight[0, 0] = math.inf
    origin = surefoot.locate(model, torch.randn(5, 4), mean_loss)
    assert (origin.kind, origin.tensor) == (OriginKind.WEIGHTS, "last.weight")


def test_the_loss_itself() -> None:
    def no_targets(model: nn.Module, batch: Tensor) -> Tensor:
        return F.cross_entropy(model(batch), torch.full((len(batch),), -100))

    origin = surefoot.locate(Block(lambda x: x), torch.randn(5, 4), no_targets)
    assert (origin.kind, origin.operation, origin.module) == (OriginKind.EMPTY_MEAN, "cross_entropy", "")
    assert "F.cross_entropy" in origin.code


def test_leaves_no_trace() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))

        def forward(self, x: Tensor) -> Tensor:
            return (self.net(x) * 0).log()

    model = Noisy()
    model.net[1].eval()
    model(torch.randn(6, 4)).nan_to_num(0.0, 0.0, 0.0).sum().backward()
    grads = [p.grad for p in model.parameters()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes = [m.training for m in model.modules()]
    called: list[int] = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: called.append(1))
    batch, rng_state = torch.randn(6, 4), torch.get_rng_state()
    assert surefoot.locate(model, batch, lambda m, b: m.train()(b).mean())
    assert torch.equal(torch.get_rng_state(), rng_state)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert modes == [m.training for m in model.modules()]
    assert not called


def test_compiled_and_autocast() -> None:
    model = torch.compile(Block(lambda x: torch.log(x * 0)), backend="eager")
    origin = surefoot.locate(model, torch.randn(5, 4), mean_loss)
    assert (origin.kind, origin.module) == (OriginKind.LOG_OF_ZERO, "act")

    def half(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.float16):
            return model(batch).float().mean()

    origin = surefoot.locate(Block(lambda x: x * 3000 * 3000), torch.randn(5, 4), half)
    assert (origin.kind, origin.operation) == (OriginKind.FLOAT16_OVERFLOW, "mul")


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(*, reentrant: bool) -> None:
    class Checkpointed(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.act, self.first(x), use_reentrant=reentrant))

    model = Checkpointed(lambda x: torch.sqrt(x * 0))
    origin = surefoot.locate(model, torch.randn(5, 4), mean_loss)
    assert (origin.operation, origin.module, origin.backward) == ("sqrt", "act", True)
    assert all(p.grad is None for p in model.parameters())


def test_a_failing_step_fn_is_named() -> None:
    no_loss: Any = lambda model, batch: None  # noqa: E731
    with pytest.raises(LocateFailed, match="step_fn must return the loss"):
        surefoot.locate(Block(lambda x: x), torch.randn(5, 4), no_loss)
    with pytest.raises(LocateFailed, match="ValueError: no"):
        surefoot.locate(Block(lambda x: x), torch.randn(5, 4), _fail)


def _fail(model: nn.Module, batch: Tensor) -> Tensor:
    raise ValueError("no")
