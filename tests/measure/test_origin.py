"""Where a value that is not a number first came up: the module that made it, not those that passed it on."""

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
    found = tracer.trace(7)
    assert found is not None
    return found.module, found.module_type, found.inputs, found.weights


def test_a_row_with_nothing_to_attend_to_is_attentions_own_doing() -> None:
    mask = torch.ones(3, 3, dtype=torch.bool)
    mask[1] = False
    assert traced(Net(), torch.randn(2, 3, 4), mask) == ("attention", "Attention", False, False)


def test_places_that_are_masked_on_purpose_are_sound() -> None:
    mask = torch.ones(3, 3, dtype=torch.bool).tril()
    assert traced(Net(), torch.randn(2, 3, 4), mask) == ("", "", False, False), "it must have been the loss"


def test_a_norm_that_makes_it_of_sound_values() -> None:
    net = Net()
    net.norm.eps = 0.0
    net.attention.out.weight.data.zero_()
    net.attention.out.bias.data.fill_(3.0)
    assert traced(net, torch.randn(2, 3, 4))[:2] == ("norm", "LayerNorm")


def test_it_came_in_from_outside() -> None:
    assert traced(Net(), torch.full((2, 3, 4), math.nan))[2]


def test_weights_that_hold_it() -> None:
    net = Net()
    net.head.weight.data[0, 0] = math.nan
    assert traced(net, torch.randn(2, 3, 4)) == ("head", "Linear", False, True)


def test_nothing_is_left_on_the_model_once_it_is_known() -> None:
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
    assert all(not module._forward_hooks for module in net.modules()), "the question has been answered"
    copied(x, mask)  # with the idle hooks of a copy


def test_evaluations_are_not_looked_at() -> None:
    net = Net()
    tracer = NanTracer(net)
    tracer.arm()
    with torch.no_grad():
        net(torch.full((2, 3, 4), math.nan), torch.ones(3, 3, dtype=torch.bool))
    tracer.end_attempt(0)
    assert tracer.trace(0) is None
