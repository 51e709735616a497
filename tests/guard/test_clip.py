"""Clipping inside the step: by norm, by value, by group, adaptive; and loops that clip themselves."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from loops import Net, batch, loss_of, net, same, snapshot, train
from torch import Tensor, nn

import surefoot
from surefoot.gate import clip as clips
from surefoot.records import Verdict

Attach = Callable[..., Any]
Read = Callable[[], surefoot.Run]
# Adam with a large eps: some gradients here are zero up to rounding, and a small eps would amplify that noise.
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "fused SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, fused=True),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3, eps=1e-3, foreach=True),
    "fused AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3, eps=1e-3, fused=True),
}


def close(a: Any, b: Any) -> bool:
    """Equal up to rounding."""
    return all(torch.allclose(x, y, rtol=1e-5, atol=1e-7) for x, y in zip(a[0].values(), b[0].values(), strict=True))


def by_hand(model: Net, optimizer: torch.optim.Optimizer, i: int, clip: Callable[[Net], object]) -> None:
    """One update of an unguarded loop that clips."""
    loss_of(model, batch(i)).backward()
    clip(model)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("threshold", [0.05, 1.0, 1e6])
def test_clip_by_norm_equals_torch(name: str, threshold: float, attach: Attach, read: Read) -> None:
    model, other = net(), net()
    optimizer, plain = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](other.parameters())
    guard = attach(model, optimizer, clip=threshold)
    norms: list[float] = []
    for i in range(10):
        train(model, optimizer, guard.watch, i)
        by_hand(other, plain, i, lambda m: norms.append(nn.utils.clip_grad_norm_(m.parameters(), threshold).item()))
        assert close(snapshot(model), snapshot(other))
        other.load_state_dict(model.state_dict())  # so that rounding does not accumulate
        plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    guard.close()
    rows = read().scalars
    expected = np.minimum(threshold / (np.array(norms) + 1e-6), 1.0)
    assert rows["norm"].tolist() == pytest.approx(norms, rel=1e-4), "the norm is the one before clipping"
    assert rows["clip"].tolist() == pytest.approx([threshold] * 10)
    assert rows["clip_factor"].tolist() == pytest.approx(expected.tolist(), rel=1e-4)
    assert rows["clip_fraction"].tolist() == pytest.approx((np.cumsum(expected < 1) / np.arange(1, 11)).tolist())
    if threshold == 1e6:
        assert same(snapshot(model, optimizer), snapshot(other, plain)), "a gradient below the threshold is unchanged"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_clip_by_value_equals_torch(name: str, attach: Attach) -> None:
    model, other = net(), net()
    optimizer, plain = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](other.parameters())
    guard = attach(model, optimizer, clip={"value": 0.01})
    for i in range(6):
        train(model, optimizer, guard.watch, i)
        by_hand(other, plain, i, lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.01))
        assert same(snapshot(model, optimizer), snapshot(other, plain))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_clip_by_norm_and_value(name: str, attach: Attach) -> None:
    model, other = net(), net()
    optimizer, plain = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](other.parameters())
    guard = attach(model, optimizer, clip={"norm": 1.0, "value": 0.1})

    def clip(m: Net) -> None:
        nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        nn.utils.clip_grad_value_(m.parameters(), 0.1)

    for i in range(6):
        train(model, optimizer, guard.watch, i)
        by_hand(other, plain, i, clip)
        assert close(snapshot(model), snapshot(other))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_param_group_has_its_own_clip(name: str, attach: Attach) -> None:
    model, other = net(), net()

    def groups(m: Net) -> list[dict[str, Any]]:
        return [{"params": [*part.parameters()]} for part in (m.first, m.norm, m.last)]

    optimizer, plain = OPTIMIZERS[name](groups(model)), OPTIMIZERS[name](groups(other))
    guard = attach(model, optimizer, clip=[0.02, None, {"value": 0.01}])

    def clip(m: Net) -> None:
        nn.utils.clip_grad_norm_(m.first.parameters(), 0.02)
        nn.utils.clip_grad_value_(m.last.parameters(), 0.01)

    for i in range(6):
        train(model, optimizer, guard.watch, i)
        by_hand(other, plain, i, clip)
        assert close(snapshot(model), snapshot(other))


class SettableNorm(nn.Module):
    """A model whose gradient norm can be set."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, norm: float) -> Tensor:
        return self.weight.sum() * (norm / 2.0)


def train_with_norm(model: SettableNorm, optimizer: torch.optim.Optimizer, guard: surefoot.Guard, norm: float) -> None:
    guard.watch(model(norm)).backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("fused", [False, True])
def test_adaptive_clip_is_the_percentile_of_accepted_norms(fused: bool, attach: Attach, read: Read) -> None:
    model = SettableNorm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=fused)
    guard = attach(model, optimizer, clip="adaptive")
    rng = np.random.default_rng(0)
    norms = rng.uniform(2.0, 12.0, 260)
    bad = {50: math.nan, 151: math.inf, 160: 1e6, 170: 1e5}
    for i, norm in enumerate(norms):
        train_with_norm(model, optimizer, guard, norm)
        if i in bad:
            train_with_norm(model, optimizer, guard, bad[i])
    guard.close()
    rows = read().scalars
    applied = rows["verdict"] == Verdict.APPLIED
    assert (~applied).sum() == len(bad)
    clip, accepted = rows["clip"][applied], rows["norm"][applied]
    assert accepted.tolist() == pytest.approx(norms.tolist(), rel=1e-5)
    known = np.flatnonzero(clip != clips.ADAPTIVE_START)[0]
    assert 100 <= known <= 110, "the start value applies until 100 norms are known"
    for i in range(known, 260):
        recent = [np.quantile(accepted[: i - back], clips.ADAPTIVE_PERCENTILE) for back in range(11)]
        assert min(recent) * (1 - 1e-4) <= clip[i] <= max(recent) * (1 + 1e-4)
    expected = np.minimum(clip / (accepted + 1e-6), 1.0)
    assert rows["clip_factor"][applied].tolist() == pytest.approx(expected.tolist(), rel=1e-4)


@pytest.mark.parametrize(("norm", "threshold"), [(0.2, clips.ADAPTIVE_MIN), (5000.0, clips.ADAPTIVE_MAX), (20.0, 20.0)])
def test_adaptive_clip_stays_within_bounds(norm: float, threshold: float, attach: Attach, read: Read) -> None:
    model = SettableNorm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    guard = attach(model, optimizer, clip="adaptive")
    for _ in range(120):
        train_with_norm(model, optimizer, guard, norm)
    guard.close()
    assert read().scalars["clip"][-1] == pytest.approx(threshold)


def test_adaptive_clip_uses_the_last_thousand_norms(attach: Attach, read: Read) -> None:
    model = SettableNorm()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    guard = attach(model, optimizer, clip="adaptive")
    for i in range(1320):
        train_with_norm(model, optimizer, guard, 50.0 if i < 300 else 5.0)
    guard.close()
    clip = read().scalars["clip"]
    assert clip[700] == pytest.approx(50.0)
    assert clip[-1] == pytest.approx(5.0), "the high norms have left the window"


def test_alternating_optimizers_have_separate_adaptive_clips(attach: Attach, read: Read) -> None:
    model = nn.ModuleList([SettableNorm(), SettableNorm()])
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.0) for part in model]
    guard = attach(model, optimizers, clip="adaptive")
    for _ in range(125):
        for k, norm in ((0, 3.0), (1, 30.0)):
            part = model[k]
            assert isinstance(part, SettableNorm)
            train_with_norm(part, optimizers[k], guard, norm)
    guard.close()
    rows = read().scalars
    for k, norm in ((0, 3.0), (1, 30.0)):
        assert rows["clip"][rows["optimizer"] == k][-1] == pytest.approx(norm), f"optimizer {k}"


def test_refused_update_is_not_clipped_and_applied(attach: Attach) -> None:
    model = net()
    optimizer = OPTIMIZERS["fused AdamW"](model.parameters())
    guard = attach(model, optimizer, clip=1.0)
    for i in range(25):
        train(model, optimizer, guard.watch, i)
    for fault in ("nan", "burst", "inf"):
        before = snapshot(model, optimizer)
        train(model, optimizer, guard.watch, 30, fault)
        assert same(before, snapshot(model, optimizer))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_norm_is_measured_before_the_loop_clips(name: str, attach: Attach, read: Read) -> None:
    model, other = net(), net()
    optimizer, plain = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](other.parameters())
    guard = attach(model, optimizer)
    norms: list[float] = []
    for i in range(24):
        guard.watch(loss_of(model, batch(i)), batch(i)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
        by_hand(other, plain, i, lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1))
    assert same(snapshot(model, optimizer), snapshot(other, plain))
    before = snapshot(model, optimizer)
    guard.watch(loss_of(model, batch(30), "burst"), batch(30)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    assert same(before, snapshot(model, optimizer)), "after the clip to 0.1 it would look healthy"
    guard.close()
    assert read().scalars["norm"][:24].tolist() == pytest.approx(norms, rel=1e-5)


def test_gradients_are_restored_after_a_refused_step(attach: Attach) -> None:
    model = net()
    optimizer = OPTIMIZERS["SGD"](model.parameters())
    guard = attach(model, optimizer)
    guard.watch(loss_of(model, batch(0), "nan"), batch(0)).backward()
    gradients = [p.grad for p in model.parameters()]
    optimizer.step()
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
