"""Saving and resuming through `attach(resume=True)`: signals, kinds of loops, invalid use."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import surefoot
from surefoot.checkpoint.store import CheckpointStore

Forward = Callable[[nn.Module, Tensor], Tensor]


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    numbers = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
    before = [signal.getsignal(n) for n in numbers]
    yield
    assert [signal.getsignal(n) for n in numbers] == before


class Loop:
    """A net with dropout and batch norm on batches drawn from torch's global generator."""

    def __init__(self, forward: Forward, run: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.3), nn.Linear(12, 6))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.forward = forward
        self.guard = surefoot.attach(
            self.model,
            self.optimizer,
            run_dir=run,
            **{"resume": True, "policy": surefoot.Policy(save_every=4), **options},
        )
        self.done = self.guard.step

    def to(self, steps: int) -> list[float]:
        losses = []
        while self.done < steps:
            x = torch.randn(5, 6)
            loss = self.guard.watch((self.forward(self.model, x) - x).pow(2).mean(), x)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.done += 1
            losses.append(loss.item())
        return losses


def call_model(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)


def call_forward(model: nn.Module, x: Tensor) -> Tensor:
    """No hook of the model runs."""
    return model.forward(x)


def call_functional(model: nn.Module, x: Tensor) -> Tensor:
    """Hooks of the model do not always run."""
    return functional_call(model, dict(model.named_parameters()), (x,))


def call_compiled(model: nn.Module, x: Tensor) -> Tensor:
    return torch.compile(model, backend="eager")(x)


@pytest.mark.parametrize("forward", [call_model, call_forward, call_functional, call_compiled])
def test_resume_is_bit_identical_for_every_way_to_call_the_model(tmp_path: Path, forward: Forward) -> None:
    straight = Loop(forward, tmp_path / "a", resume=False)
    expected = straight.to(30)
    straight.guard.close()
    killed = Loop(forward, tmp_path / "b")
    killed.to(22)
    killed.guard._checkpointer._manager.poll(wait=True)  # type: ignore[attr-defined]
    kept = [checkpoint.step for checkpoint in CheckpointStore(tmp_path / "b" / "checkpoints").all()]
    killed.guard.__exit__(RuntimeError, RuntimeError("planted crash"), None)
    again = Loop(forward, tmp_path / "b")
    assert again.done == max(kept)
    assert 0 < again.done < 22
    assert again.to(30) == expected[max(kept) :]
    again.guard.close()


def test_observe_refuses_to_resume(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="changes nothing"):
        Loop(call_model, tmp_path, policy="observe")


def test_off_guard_saves_nothing_and_installs_no_signal_handler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUREFOOT", "off")
    before = signal.getsignal(signal.SIGTERM)
    loop = Loop(call_model, tmp_path / "run")
    loop.to(10)
    assert signal.getsignal(signal.SIGTERM) is before
    assert not (tmp_path / "run").exists()


def test_run_ended_by_a_signal_resumes_at_the_same_step(tmp_path: Path) -> None:
    loop = Loop(call_model, tmp_path)
    loop.to(7)
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, loop.guard:
        loop.to(20)
    assert ended.value.code == 128 + signal.SIGTERM
    again = Loop(call_model, tmp_path)
    assert again.done == loop.done
    again.guard.close()


def test_users_signal_handler_is_called_and_the_run_is_saved(tmp_path: Path) -> None:
    received: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: received.append(number))
    try:
        loop = Loop(call_model, tmp_path)
        loop.to(7)
        signal.raise_signal(signal.SIGUSR1)
        loop.to(12)
        assert received == [signal.SIGUSR1]
        kinds = {
            checkpoint.step: checkpoint.about["kind"] for checkpoint in CheckpointStore(tmp_path / "checkpoints").all()
        }
        assert "emergency" in kinds.values()
        loop.guard.close()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_two_runs_in_one_process_are_saved_independently(tmp_path: Path) -> None:
    first = Loop(call_model, tmp_path / "a")
    second = Loop(call_model, tmp_path / "b")
    first.to(6)
    second.to(6)
    first.guard.close()
    second.to(9)
    second.guard.close()
    assert steps_of(tmp_path / "a") == 6
    assert steps_of(tmp_path / "b") == 9


def steps_of(run: Path) -> int:
    again = Loop(call_model, run)
    again.guard.close()
    return again.done


def test_resume_is_exact_with_evaluations_and_two_optimizers(tmp_path: Path) -> None:
    def build(run: Path) -> tuple[Loop, torch.optim.Optimizer]:
        torch.manual_seed(0)
        loop = Loop.__new__(Loop)
        loop.model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.3), nn.Linear(12, 6))
        loop.optimizer = torch.optim.AdamW(loop.model[0].parameters(), lr=0.01)
        other = torch.optim.SGD([*loop.model[1].parameters(), *loop.model[3].parameters()], lr=0.01, momentum=0.9)
        loop.guard = surefoot.attach(
            loop.model, [loop.optimizer, other], run_dir=run, resume=True, policy=surefoot.Policy(save_every=4)
        )
        loop.done = loop.guard.step
        return loop, other

    def train(loop: Loop, other: torch.optim.Optimizer, steps: int) -> list[float]:
        losses = []
        while loop.done < steps:
            x = torch.randn(5, 6)
            loss = loop.guard.watch((loop.model(x) - x).pow(2).mean(), x)
            loss.backward()
            for optimizer in (loop.optimizer, other):
                optimizer.step()
                optimizer.zero_grad()
            loop.done += 1
            losses.append(loss.item())
            loop.model.eval()
            with torch.no_grad():
                loop.model(torch.ones(2, 6))
            loop.model.train()
        return losses

    straight = build(tmp_path / "a")
    expected = train(*straight, 24)
    straight[0].guard.close()
    killed = build(tmp_path / "b")
    train(*killed, 17)
    killed[0].guard.__exit__(RuntimeError, RuntimeError("planted crash"), None)
    again = build(tmp_path / "b")
    assert 0 < again[0].done < 17
    begun = again[0].done
    assert train(*again, 24) == expected[begun:]
    again[0].guard.close()
