"""Which tensors are measured, under which names, for which optimizer."""

from __future__ import annotations

import torch
from torch import nn

from surefoot.measure.layout import layout_params, local_grads


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_are_measured_once() -> None:
    model = Tied()
    layout = layout_params(model, [torch.optim.SGD(model.parameters(), lr=0.1)])
    assert layout.names == ("embed.weight",)
    assert layout.params[0] is model.head.weight


def test_groups_and_optimizers_are_in_order() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4))
    first = torch.optim.SGD([{"params": [model[1].weight]}, {"params": [model[0].bias, model[0].weight]}], lr=0.1)
    second = torch.optim.Adam([model[1].bias])
    layout = layout_params(model, [first, second])
    assert layout.names == ("1.weight", "0.bias", "0.weight", "1.bias")
    assert layout.group_spans == ((slice(0, 1), slice(1, 3)), (slice(3, 4),))
    assert layout.optimizer_spans == (slice(0, 3), slice(3, 4))
    assert layout.numels == layout.local_numels == (12, 3, 6, 4)
    assert not layout.sharded


def test_a_parameter_of_two_optimizers_is_measured_for_each() -> None:
    model = nn.Linear(2, 2)
    layout = layout_params(model, [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD([model.bias], lr=0.1)])
    assert layout.names == ("weight", "bias", "bias@2")
    assert layout.params[1] is layout.params[2]


def test_parameters_of_no_optimizer_come_last_and_frozen_ones_not_at_all() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[2].requires_grad_(False)
    layout = layout_params(model, [torch.optim.SGD(model[1].parameters(), lr=0.1)])
    assert layout.names == ("1.weight", "1.bias", "0.weight", "0.bias")
    assert layout.optimizer_spans == (slice(0, 2),)


def test_params_outside_the_model_get_generated_names() -> None:
    model = nn.Linear(2, 2)
    loose = nn.Parameter(torch.zeros(3))
    layout = layout_params(model, [torch.optim.SGD([*model.parameters(), loose], lr=0.1)])
    assert layout.names == ("weight", "bias", "optimizer0.group0.2")
    assert len(set(layout.names)) == 3


def test_an_empty_group_has_an_empty_span() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD([{"params": []}, {"params": list(model.parameters())}], lr=0.1)
    layout = layout_params(model, [optimizer])
    assert layout.group_spans == ((slice(0, 0), slice(0, 2)),)
    assert layout.optimizer_spans == (slice(0, 2),)


def test_matches_is_false_after_the_groups_changed() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    layout = layout_params(model, [optimizer])
    assert layout.matches([optimizer])
    optimizer.add_param_group({"params": list(model[1].parameters())})
    assert not layout.matches([optimizer])


def test_matches_is_false_after_a_parameter_was_replaced() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    layout = layout_params(model, [optimizer])
    model.weight = nn.Parameter(torch.zeros(2, 2))
    optimizer.param_groups[0]["params"][0] = model.weight
    assert not layout.matches([optimizer]), "the layout holds the old parameter"


def test_local_grads_returns_the_current_gradients() -> None:
    model = nn.Linear(2, 2)
    params = list(model.parameters())
    assert local_grads(params) == [None, None]
    model.weight.grad = torch.ones(2, 2)
    grads = local_grads(params)
    assert grads[0] is model.weight.grad
    assert grads[1] is None
