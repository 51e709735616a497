"""The tracer names the module that produced a NaN, not those that passed it on."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from surefoot.measure.nan_tracer import MAX_TRACES, NanTracer


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.out((x @ x.transpose(-1, -2)).masked_fill(~mask, -math.inf).softmax(-1) @ x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.norm(self.attention(x, mask)))


def traced(net: Net, x: Tensor, mask: Tensor | None = None) -> tuple[str, str, bool, bool]:
    tracer = NanTracer(net)
    tracer.arm()
    net(x, torch.ones(3, 3, dtype=torch.bool) if mask is None else mask)
    tracer.end_attempt(7)
    origin = tracer.trace(7)
    assert origin is not None
    return origin.module, origin.module_type, origin.inputs, origin.weights


def test_a_fully_masked_attention_row_is_traced_to_attention() -> None:
    mask = torch.ones(3, 3, dtype=torch.bool)
    mask[1] = False
    assert traced(Net(), torch.randn(2, 3, 4), mask) == ("attention", "Attention", False, False)


def test_minus_infinity_masks_are_not_reported() -> None:
    mask = torch.ones(3, 3, dtype=torch.bool).tril()
    assert traced(Net(), torch.randn(2, 3, 4), mask) == ("", "", False, False), "the NaN must come from the loss"


def test_a_norm_that_produces_nan_from_finite_values() -> None:
    net = Net()
    net.norm.eps = 0.0
    net.attention.out.weight.data.zero_()
    net.attention.out.bias.data.fill_(3.0)
    assert traced(net, torch.randn(2, 3, 4))[:2] == ("norm", "LayerNorm")


def test_nan_in_the_inputs() -> None:
    assert traced(Net(), torch.full((2, 3, 4), math.nan))[2]


def test_nan_in_the_weights() -> None:
    net = Net()
    net.head.weight.data[0, 0] = math.nan
    assert traced(net, torch.randn(2, 3, 4)) == ("head", "Linear", False, True)


def test_hooks_are_removed_after_the_last_trace() -> None:
    net, x, mask = Net(), torch.full((2, 3, 4), math.nan), torch.ones(3, 3, dtype=torch.bool)
    tracer = NanTracer(net)
    tracer.arm()
    copied = copy.deepcopy(net)
    for k in range(MAX_TRACES):
        net(x, mask)
        tracer.end_attempt(k)
        assert tracer.trace(k) is not None
    assert all(not module._forward_hooks for module in net.modules())
    tracer.arm()
    assert all(not module._forward_hooks for module in net.modules()), "no more traces are taken"
    copied(x, mask)  # a copied model has idle hooks


def test_evaluation_is_not_traced() -> None:
    net = Net()
    tracer = NanTracer(net)
    tracer.arm()
    with torch.no_grad():
        net(torch.full((2, 3, 4), math.nan), torch.ones(3, 3, dtype=torch.bool))
    tracer.end_attempt(0)
    assert tracer.trace(0) is None
