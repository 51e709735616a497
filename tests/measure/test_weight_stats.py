"""The relative size of an update, estimated from a sample of the weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from surefoot.measure.weight_stats import UpdateSample


def sample_of(params: list[Tensor], once: list[int] | None = None, device: str = "cpu") -> UpdateSample:
    return UpdateSample(params, torch.tensor(once or [1] * len(params), device=device), torch.device(device))


def test_change_and_size_of_the_sampled_weights(device: torch.device) -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, device=device)) for shape in ((100, 70), (509,), (510,), (3,))]
    sample = sample_of(params, device=str(device))
    before = [p.detach().clone() for p in params]
    sample.take()
    with torch.no_grad():
        for p in params:
            p.add_(torch.randn_like(p) * 0.01)
    squares = sample.compare()
    assert squares is not None
    now = [p.detach() for p in params]
    update = [p - b for p, b in zip(now, before, strict=True)]
    strides = [7, 1, 1, 1]  # odd, and small enough for sufficient samples
    change = sum(k * p.reshape(-1)[::k].double().square().sum().item() for k, p in zip(strides, update, strict=True))
    size = sum(k * p.reshape(-1)[::k].double().square().sum().item() for k, p in zip(strides, now, strict=True))
    assert math.isclose(float(squares[0]), change, rel_tol=1e-5)
    assert math.isclose(float(squares[1]), size, rel_tol=1e-5)


def test_the_sample_estimates_the_update_ratio() -> None:
    torch.manual_seed(0)
    param = nn.Parameter(torch.randn(1000, 1000))
    sample = sample_of([param])
    sample.take()
    with torch.no_grad():
        param.mul_(1.0 + 1e-3)
    squares = sample.compare()
    assert squares is not None
    assert math.isclose(math.sqrt(float(squares[0] / squares[1])), 1e-3, rel_tol=1e-2)


def test_a_small_model_is_sampled_densely_enough() -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in ((48, 16), (48,), (48, 48), (6, 48), (6,))]
    sample = sample_of(params)
    sample.take()
    weight_norm = math.sqrt(sum(p.detach().square().sum().item() for p in params))
    with torch.no_grad():
        for p in params:
            p.add_(0.01 * torch.randn_like(p).sign())
    squares = sample.compare()
    assert squares is not None
    update = 0.01 * math.sqrt(sum(p.numel() for p in params))
    assert math.isclose(math.sqrt(float(squares[0] / squares[1])), update / weight_norm, rel_tol=0.08)


def test_without_a_sample_there_is_no_result() -> None:
    param = nn.Parameter(torch.ones(5))
    sample = sample_of([param])
    assert sample.compare() is None
    sample.take()
    assert sample.compare() is not None


def test_frozen_weights_and_those_of_other_ranks_are_not_sampled() -> None:
    frozen = nn.Parameter(torch.ones(4), requires_grad=False)
    other_ranks, own = nn.Parameter(torch.ones(4)), nn.Parameter(torch.full((4,), 2.0))
    sample = sample_of([frozen, other_ranks, own], [1, 0, 1])
    sample.take()
    squares = sample.compare()
    assert squares is not None
    assert [float(t) for t in squares] == [0.0, 16.0]


def test_weights_of_any_dtype_and_layout_can_be_sampled() -> None:
    params = [
        nn.Parameter(torch.full((2,), 1 + 2j)),
        nn.Parameter(torch.ones(6, 2, dtype=torch.bfloat16).t()),
        nn.Parameter(torch.ones(3, dtype=torch.float64)),
        nn.Parameter(torch.empty(0)),
        nn.Parameter(torch.tensor(2.0)),
    ]
    sample = sample_of(params)
    sample.take()
    with torch.no_grad():
        params[-1].sub_(1.0)
    squares = sample.compare()
    assert squares is not None
    assert [float(t) for t in squares] == [1.0, 10.0 + 12.0 + 3.0 + 1.0]
