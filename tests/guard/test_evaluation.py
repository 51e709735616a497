"""A signal during a long evaluation: the run is saved immediately, and the resume is exact."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import surefoot
from surefoot.checkpoint.store import CheckpointStore
from surefoot.data import make_loader


class Loop:
    """Evaluates after every tenth fetch, before training on that batch, as many loops do."""

    def __init__(self, run: Path, *, ours: bool = True, in_evaluation: Callable[[int], None] = lambda i: None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Dropout(0.3), nn.Linear(12, 6))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.loader = make_loader(torch.randn(64, 6), 4, seed=3) if ours else None
        self.guard = surefoot.attach(self.model, self.optimizer, run_dir=run, resume=True, loader=self.loader)
        self.done, self.in_evaluation, self.calls = self.guard.step, in_evaluation, 0

    def to(self, steps: int) -> list[float]:
        losses: list[float] = []
        while self.done < steps:
            for x in self.loader if self.loader is not None else iter(lambda: torch.randn(4, 6), None):
                if self.done % 10 == 0:
                    self.evaluate()
                loss = self.guard.watch((self.model(x) - x).pow(2).mean(), x)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.done += 1
                losses.append(loss.item())
                if self.done == steps:
                    break
        return losses

    def evaluate(self) -> None:
        self.model.eval()
        with torch.no_grad():
            for _ in range(50):
                self.calls += 1
                self.in_evaluation(self.calls)
                self.model(torch.ones(2, 6))
                torch.rand(3)  # a resumed run that evaluates again draws these again
        self.model.train()


@pytest.mark.parametrize("ours", [True, False], ids=["a loader", "batches drawn by the loop"])
def test_signal_during_an_evaluation_ends_the_run_immediately(tmp_path: Path, ours: bool) -> None:
    straight = Loop(tmp_path / "a", ours=ours)
    expected = straight.to(35)
    straight.guard.close()

    def signalled(call: int) -> None:
        if call == 110:  # in the evaluation after 20 updates
            signal.raise_signal(signal.SIGTERM)

    loop = Loop(tmp_path / "b", ours=ours, in_evaluation=signalled)
    with pytest.raises(SystemExit) as ended, loop.guard:
        loop.to(35)
    assert ended.value.code == 128 + signal.SIGTERM
    assert loop.calls == 110
    (kept,) = CheckpointStore(tmp_path / "b" / "checkpoints").all()
    assert (kept.step, kept.kind) == (20, "emergency")
    again = Loop(tmp_path / "b", ours=ours)
    assert again.to(35) == expected[20:]
    again.guard.close()


def test_evaluation_without_a_signal_runs_to_its_end(tmp_path: Path) -> None:
    loop: Any = Loop(tmp_path)
    loop.to(25)
    assert loop.calls == 150
    loop.guard.close()
    assert [kept.step for kept in CheckpointStore(tmp_path / "checkpoints").all()] == [25]
