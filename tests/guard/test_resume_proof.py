"""A resume is verified by computing the loss of the saved batch again, without changing the training."""

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
    """A net with dropout and batch norm on batches drawn from torch's global generator."""

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


def run_to_end(run: Path, *, steps: int = 14, step_fn: Any = step, **policy: Any) -> list[float]:
    loop = Loop(run, step_fn, **policy)
    losses = loop.to(steps)
    loop.guard.close()
    return losses


def verdicts(run: Path) -> list[dict[str, Any]]:
    return [e for e in read(run).events if e.get("name") in ("proved", "unproven")]


def test_replayed_batch_has_its_saved_loss(tmp_path: Path) -> None:
    run_to_end(tmp_path)
    assert Loop(tmp_path, step).guard.close() is None
    (event,) = verdicts(tmp_path)
    assert event["name"] == "proved"
    assert event["values"]["state"] is True
    assert event["values"]["probe"] == "equal"
    assert event["values"]["loss"] == event["values"]["was"] > 0
    assert "bit for bit" in event["detail"]


@pytest.mark.parametrize("forward", [None, lambda model, x: model.forward(x)], ids=["seen", "unseen"])
def test_replay_check_does_not_change_training(tmp_path: Path, forward: Any) -> None:
    plain = Loop(tmp_path / "a", None)
    expected = plain.to(20, forward)
    plain.guard.close()
    rng_state = torch.get_rng_state()
    checked = Loop(tmp_path / "b", step)
    assert checked.to(20, forward) == expected
    assert torch.equal(torch.get_rng_state(), rng_state)
    for expected_tensor, tensor in zip(
        plain.model.state_dict().values(), checked.model.state_dict().values(), strict=True
    ):
        assert torch.equal(expected_tensor, tensor)
    assert checked.model.training
    checked.guard.close()
    Loop(tmp_path / "b", step).guard.close()
    assert verdicts(tmp_path / "b")[-1]["values"]["probe"] == "equal"


def test_changed_model_code_is_reported_and_the_run_resumes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run_to_end(tmp_path)
    tensor = Loop(tmp_path, lambda model, batch: 1.1 * step(model, batch))
    assert tensor.to(16)
    tensor.guard.close()
    (event,) = verdicts(tmp_path)
    assert event["name"] == "unproven"
    assert (event["values"]["state"], event["values"]["probe"]) == (True, "differs")
    assert "code or step_fn changed" in event["detail"]
    assert any(
        "code or step_fn changed" in record.message for record in caplog.records if record.levelname == "WARNING"
    )


def test_loss_that_differs_by_rounding_is_close(tmp_path: Path) -> None:
    run_to_end(tmp_path)
    Loop(tmp_path, lambda model, batch: step(model, batch) * (1 + 1e-6)).guard.close()
    (event,) = verdicts(tmp_path)
    assert (event["name"], event["values"]["probe"]) == ("proved", "close")


def test_without_step_fn_only_the_state_is_verified(tmp_path: Path) -> None:
    run_to_end(tmp_path, step_fn=None)
    Loop(tmp_path, None).guard.close()
    (event,) = verdicts(tmp_path)
    assert (event["name"], event["values"]["probe"]) == ("proved", "none")
    assert "only that is verified" in event["detail"]


def test_replay_check_interval_and_cost(tmp_path: Path) -> None:
    def probed(run: Path) -> list[bool]:
        return ["probe_seconds" in e["values"] for e in read(run).events if e.get("name") == "saved"]

    run_to_end(tmp_path / "off", probe_every=0)
    run_to_end(tmp_path / "second", probe_every=2, steps=80)  # a save that falls due during another is delayed
    assert set(probed(tmp_path / "off")) == {False}
    assert probed(tmp_path / "second")[0]
    assert not all(probed(tmp_path / "second"))


def test_failing_step_fn_is_reported_once_and_only_the_check_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(model: nn.Module, batch: Any) -> Tensor:
        raise KeyError("labels")

    losses = run_to_end(tmp_path, step_fn=broken)
    assert len(losses) == 14
    assert len([r for r in caplog.records if "labels" in r.message]) == 1
    Loop(tmp_path, step).guard.close()
    assert "no batch to replay" in verdicts(tmp_path)[-1]["detail"]


def test_replay_check_does_not_recompile_the_model(tmp_path: Path) -> None:
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
