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
    """GRPO in small: a policy over 16 answers, rewards centred within a group, so that every loss is about zero."""
    torch.manual_seed(seed)
    policy = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16))
    reference = copy.deepcopy(policy)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    best, prompts = torch.randint(0, 16, (64,)), torch.randn(64, 8)
    for _ in range(updates):
        asked = torch.randint(0, 64, (4,))
        chances = torch.distributions.Categorical(logits=policy(prompts[asked]).unsqueeze(1).expand(-1, 8, -1))
        answers = chances.sample()
        with torch.no_grad():
            logits = reference(prompts[asked]).unsqueeze(1).expand(-1, 8, -1)
            apart = torch.distributions.Categorical(logits=logits).log_prob(answers)
        rewards = (answers == best[asked, None]).float()
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        log_prob = chances.log_prob(answers)
        kl = (apart - log_prob).exp() - (apart - log_prob) - 1
        ratio = (log_prob - log_prob.detach()).exp()
        yield policy, optimizer, -(ratio * advantages).mean() + 0.04 * kl.mean(), -rewards.mean()


WAYS: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "the loss": lambda progress: {},
    "minus the reward": lambda progress: {"progress": progress},
    "nothing": lambda progress: {"progress": None},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_that_is_about_zero_by_construction_is_no_incident(way: str, attach: Attach, read: Read) -> None:
    guard, losses, told = None, [], []
    for policy, optimizer, loss, progress in group_relative(1, 300):
        guard = guard or attach(policy, optimizer)
        losses.append(loss.item())
        told.append(progress.item())
        optimizer.zero_grad()
        guard.watch(loss, **WAYS[way](progress)).backward()
        optimizer.step()
    assert guard is not None
    guard.close()
    assert [e for e in read().events if e["kind"] == "decision"] == []
    assert guard.step == len(losses)
    scalars = read().scalars
    assert scalars["loss"].tolist() == pytest.approx(losses), "the loss itself is recorded, whatever is judged"
    if way == "minus the reward":
        assert scalars["progress"].tolist() == pytest.approx(told)
        assert set(scalars["judged_by"].tolist()) == {JudgedBy.PROGRESS}
    else:
        assert all(math.isnan(p) for p in scalars["progress"].tolist())


@pytest.mark.parametrize("number", [float, torch.tensor])
def test_progress_is_the_mean_over_micro_batches(number: Callable[[float], Any], attach: Attach, read: Read) -> None:
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


def test_a_loss_that_is_not_judged_is_still_refused_when_it_is_not_finite(attach: Attach, read: Read) -> None:
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
def test_progress_that_is_no_number_is_refused_with_the_way_out(progress: Any, attach: Attach) -> None:
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


def test_a_watched_loss_without_backward_is_reported(
    attach: Attach, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = attach(model, optimizer)
    with caplog.at_level(logging.WARNING, "surefoot"):
        steps_on_another_loss(model, guard, optimizer, 2)
        assert not caplog.records, "two steps may be a loop that is only starting"
        steps_on_another_loss(model, guard, optimizer, 10)
    guard.close()
    (warning,) = [r.getMessage() for r in caplog.records]
    assert "backward() did not run from the watched loss in 3 steps in a row" in warning
    assert [e["name"] for e in read().events if e.get("name") == "no_backward"] == ["no_backward"]


def test_losses_that_are_watched_and_thrown_away_now_and_then_are_no_mistake(
    attach: Attach, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = attach(model, optimizer)
    with caplog.at_level(logging.WARNING, "surefoot"):
        for i in range(12):
            optimizer.zero_grad()
            guard.watch(loss_of(model, batch(i)), batch(i))  # the loop passes over this one
            guard.watch(loss_of(model, batch(i)), batch(i)).backward()
            optimizer.step()
    assert not caplog.records
