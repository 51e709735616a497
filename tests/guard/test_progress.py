"""Runs whose loss does not show whether they learn, and loops that watch the wrong loss."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from loops import Net, batch, loss_of, net
from torch import Tensor, nn

import surefoot
from surefoot.records import JudgedBy

Attach = Callable[..., surefoot.Guard]
Read = Callable[[], Any]


def group_relative(seed: int, updates: int) -> Iterator[tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]]:
    """Minimal GRPO: a policy over 16 actions with rewards centred within a group, so that every loss is about zero."""
    torch.manual_seed(seed)
    policy = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16))
    reference = copy.deepcopy(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    best, prompts = torch.randint(0, 16, (64,)), torch.randn(64, 8)
    for _ in range(updates):
        indices = torch.randint(0, 64, (4,))
        distribution = torch.distributions.Categorical(logits=policy(prompts[indices]).unsqueeze(1).expand(-1, 8, -1))
        actions = distribution.sample()
        with torch.no_grad():
            logits = reference(prompts[indices]).unsqueeze(1).expand(-1, 8, -1)
            reference_log_prob = torch.distributions.Categorical(logits=logits).log_prob(actions)
        rewards = (actions == best[indices, None]).float()
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        log_prob = distribution.log_prob(actions)
        kl = (reference_log_prob - log_prob).exp() - (reference_log_prob - log_prob) - 1
        ratio = (log_prob - log_prob.detach()).exp()
        yield policy, optimizer, -(ratio * advantages).mean() + 0.04 * kl.mean(), -rewards.mean()


JUDGED_BY: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "the loss": lambda progress: {},
    "minus the reward": lambda progress: {"progress": progress},
    "nothing": lambda progress: {"progress": None},
}


@pytest.mark.parametrize("judged_by", JUDGED_BY)
def test_loss_around_zero_by_construction_is_no_incident(judged_by: str, attach: Attach, read: Read) -> None:
    guard, losses, progress_values = None, [], []
    for policy, optimizer, loss, progress in group_relative(1, 300):
        guard = guard or attach(policy, optimizer)
        losses.append(loss.item())
        progress_values.append(progress.item())
        optimizer.zero_grad()
        guard.watch(loss, **JUDGED_BY[judged_by](progress)).backward()
        optimizer.step()
    assert guard is not None
    guard.close()
    assert [e for e in read().events if e["kind"] == "decision"] == []
    assert guard.step == len(losses)
    scalars = read().scalars
    assert scalars["loss"].tolist() == pytest.approx(losses), "the loss is recorded whatever is judged"
    if judged_by == "minus the reward":
        assert scalars["progress"].tolist() == pytest.approx(progress_values)
        assert set(scalars["judged_by"].tolist()) == {JudgedBy.PROGRESS}
    else:
        assert all(math.isnan(p) for p in scalars["progress"].tolist())


@pytest.mark.parametrize("number", [float, torch.tensor])
def test_progress_is_the_mean_over_microbatches(number: Callable[[float], Any], attach: Attach, read: Read) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = attach(model, optimizer)
    for i in range(4):
        optimizer.zero_grad()
        for part in range(3):
            progress = number(10.0 * i + part)
            guard.watch(loss_of(model, batch(3 * i + part)) / 3, batch(0), progress=progress).backward()
        optimizer.step()
    guard.close()
    assert read().scalars["progress"].tolist() == pytest.approx([10.0 * i + 1 for i in range(4)])


def test_nonfinite_loss_is_refused_even_if_not_judged(attach: Attach, read: Read) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = attach(model, optimizer)
    for i in range(6):
        optimizer.zero_grad()
        loss = loss_of(model, batch(i), "nan" if i == 3 else None)
        guard.watch(loss, batch(i), progress=None).backward()
        optimizer.step()
    guard.close()
    assert guard.step == 5
    assert [e["action"] for e in read().events if e["kind"] == "decision"] == ["refuse"]


@pytest.mark.parametrize("progress", ["much", [1.0], torch.ones(2)])
def test_non_numeric_progress_is_refused_with_advice(progress: Any, attach: Attach) -> None:
    model = net()
    guard = attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
    with pytest.raises(ValueError, match=r"progress= must be one number.*falls as the run improves"):
        guard.watch(loss_of(model, batch(0)), progress=progress)


def steps_on_another_loss(model: Net, guard: surefoot.Guard, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for i in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch(i))
        guard.watch(loss * 2, batch(i))
        loss.backward()
        optimizer.step()


def test_watched_loss_without_backward_is_reported(
    attach: Attach, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = attach(model, optimizer)
    with caplog.at_level(logging.WARNING, "surefoot"):
        steps_on_another_loss(model, guard, optimizer, 2)
        assert not caplog.records, "two steps are not enough for a warning"
        steps_on_another_loss(model, guard, optimizer, 10)
    guard.close()
    (warning,) = [r.getMessage() for r in caplog.records]
    assert "backward() did not run from the watched loss in 3 steps in a row" in warning
    assert [e["name"] for e in read().events if e.get("name") == "no_backward"] == ["no_backward"]


def test_watched_losses_that_the_loop_skips_are_not_reported(attach: Attach, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = attach(model, optimizer)
    with caplog.at_level(logging.WARNING, "surefoot"):
        for i in range(12):
            optimizer.zero_grad()
            guard.watch(loss_of(model, batch(i)), batch(i))  # skipped by the loop
            guard.watch(loss_of(model, batch(i)), batch(i)).backward()
            optimizer.step()
    assert not caplog.records
