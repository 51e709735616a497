"""A resume is verified by computing the loss of the saved batch again, without a trace in the training."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import surefoot
from surefoot.journal.reader import read


class Loop:
    """A net with dropout and batch norm, on batches that torch's random numbers make."""

    def __init__(self, run: Path, step_fn: Any, **policy: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.3), nn.Linear(12, 6))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        rules = surefoot.Policy(**{"save_every": 4, **policy})
        own = {} if step_fn is None else {"step_fn": step_fn}
        self.guard = surefoot.attach(self.model, self.optimizer, run_dir=run, resume=True, policy=rules, **own)
        self.done = self.guard.step

    def to(self, steps: int, forward: Callable[[nn.Module, Tensor], Tensor] | None = None) -> list[float]:
        losses = []
        while self.done < steps:
            x = torch.randn(5, 6)
            made = (forward or self.model.__class__.__call__)(self.model, x)
            loss = self.guard.watch((made - x).pow(2).mean(), {"x": x, "names": ["a"] * 5})
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.done += 1
            losses.append(loss.item())
        return losses


def step(model: nn.Module, batch: Mapping[str, Any]) -> Tensor:
    assert not model.training
    assert len(batch["names"]) == len(batch["x"])
    return (
        (model(batch["x"]) - batch["x"]).pow(2).mean() + 0 * torch.rand(()) + 0 * random.random() + 0 * np.random.rand()
    )


def ended(run: Path, *, steps: int = 14, step_fn: Any = step, **policy: Any) -> list[float]:
    loop = Loop(run, step_fn, **policy)
    losses = loop.to(steps)
    loop.guard.close()
    return losses


def verdicts(run: Path) -> list[dict[str, Any]]:
    return [e for e in read(run).events if e.get("name") in ("proved", "unproven")]


def test_a_saved_batch_has_the_loss_it_had_and_the_journal_says_so(tmp_path: Path) -> None:
    ended(tmp_path)
    assert Loop(tmp_path, step).guard.close() is None
    (told,) = verdicts(tmp_path)
    assert told["name"] == "proved"
    assert told["values"]["state"] is True
    assert told["values"]["probe"] == "equal"
    assert told["values"]["loss"] == told["values"]["was"] > 0
    assert "bit for bit" in told["detail"]


@pytest.mark.parametrize("forward", [None, lambda model, x: model.forward(x)], ids=["seen", "unseen"])
def test_the_replay_check_changes_nothing_in_the_training(tmp_path: Path, forward: Any) -> None:
    plain = Loop(tmp_path / "a", None)
    expected = plain.to(20, forward)
    plain.guard.close()
    drawn = torch.get_rng_state()
    asked = Loop(tmp_path / "b", step)
    assert asked.to(20, forward) == expected
    assert torch.equal(torch.get_rng_state(), drawn)
    for one, other in zip(plain.model.state_dict().values(), asked.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    assert asked.model.training
    asked.guard.close()
    Loop(tmp_path / "b", step).guard.close()
    assert verdicts(tmp_path / "b")[-1]["values"]["probe"] == "equal"


def test_a_model_whose_code_has_changed_is_reported_and_resumes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ended(tmp_path)
    other = Loop(tmp_path, lambda model, batch: 1.1 * step(model, batch))
    assert other.to(16)
    other.guard.close()
    (told,) = verdicts(tmp_path)
    assert told["name"] == "unproven"
    assert (told["values"]["state"], told["values"]["probe"]) == (True, "differs")
    assert "code or step_fn changed" in told["detail"]
    assert any(
        "code or step_fn changed" in record.message for record in caplog.records if record.levelname == "WARNING"
    )


def test_a_loss_that_differs_by_rounding_alone_is_close(tmp_path: Path) -> None:
    ended(tmp_path)
    Loop(tmp_path, lambda model, batch: step(model, batch) * (1 + 1e-6)).guard.close()
    (told,) = verdicts(tmp_path)
    assert (told["name"], told["values"]["probe"]) == ("proved", "close")


def test_without_a_step_fn_only_the_state_is_proven_and_that_is_said(tmp_path: Path) -> None:
    ended(tmp_path, step_fn=None)
    Loop(tmp_path, None).guard.close()
    (told,) = verdicts(tmp_path)
    assert (told["name"], told["values"]["probe"]) == ("proved", "none")
    assert "only that is verified" in told["detail"]


def test_the_replay_check_can_be_off_or_rare_and_its_cost_is_recorded(tmp_path: Path) -> None:
    def probed(run: Path) -> list[bool]:
        return ["probe_seconds" in e["values"] for e in read(run).events if e.get("name") == "saved"]

    ended(tmp_path / "off", probe_every=0)
    ended(tmp_path / "second", probe_every=2, steps=80)  # a save that falls due during another comes later
    assert set(probed(tmp_path / "off")) == {False}
    assert probed(tmp_path / "second")[0]
    assert not all(probed(tmp_path / "second"))


def test_a_step_fn_that_fails_is_told_once_and_costs_nothing_but_the_proof(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(model: nn.Module, batch: Any) -> Tensor:
        raise KeyError("labels")

    losses = ended(tmp_path, step_fn=broken)
    assert len(losses) == 14
    assert len([r for r in caplog.records if "labels" in r.message]) == 1
    Loop(tmp_path, step).guard.close()
    assert "no batch to replay" in verdicts(tmp_path)[-1]["detail"]


def test_a_compiled_model_is_not_compiled_again_for_it(tmp_path: Path) -> None:
    compiles: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiles.append(1)
        return graph.forward

    def train(run: Path, step_fn: Any) -> int:
        torch._dynamo.reset()
        compiles.clear()
        loop = Loop(run, step_fn)
        compiled = torch.compile(loop.model, backend=backend)
        loop.to(20, lambda model, x: compiled(x))
        loop.guard.close()
        return len(compiles)

    assert train(tmp_path / "a", None) == train(tmp_path / "b", step)
    assert any("probe_seconds" in e["values"] for e in read(tmp_path / "b").events if e.get("name") == "saved")
