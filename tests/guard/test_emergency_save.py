"""When an incident begins, the last good snapshot is written to disk at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import surefoot
from surefoot.actions.stop import TrainingStopped
from surefoot.checkpoint.store import CheckpointStore, StoredCheckpoint
from surefoot.data import make_loader
from surefoot.journal.reader import read


class Loop:
    """A loop without periodic saves; from batch `poison` on, all batches are NaN."""

    def __init__(self, run: Path, poison: int = 1 << 60, **policy: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.loader = make_loader(torch.randn(64, 6), 4, seed=3)
        rules = surefoot.Policy(**{"save_every": 10_000, "snapshot_every": 5, "healthy_steps_to_trust": 5, **policy})
        self.guard = surefoot.attach(
            self.model, self.optimizer, run_dir=run, resume=True, policy=rules, loader=self.loader
        )
        self.run, self.poison, self.batches = run, poison, 0

    def train(self, count: int) -> None:
        while True:
            for x in self.loader:
                self.batches += 1
                y = x * float("nan") if self.batches > self.poison else x
                self.guard.watch((self.model(y) - x).pow(2).mean(), y).backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                if self.batches >= count:
                    return

    def kept(self) -> list[StoredCheckpoint]:
        return CheckpointStore(self.run / "checkpoints").all()


def test_last_good_snapshot_is_saved_when_an_incident_begins(tmp_path: Path) -> None:
    loop = Loop(tmp_path, poison=40, max_consecutive_vetoes=500, max_failed_actions=50, max_actions=50)
    loop.train(46)
    loop.guard._checkpointer._manager.close()  # type: ignore[attr-defined]
    (kept,) = loop.kept()
    assert kept.kind == "emergency"
    assert kept.health == "healthy"
    assert 20 <= kept.step <= 40
    known = json.loads((kept.folder / "state-00001.json").read_text())["guard"]["history"]
    assert len(known["losses"]) == len(known["norms"]) > kept.step
    loop.guard.__exit__(RuntimeError, RuntimeError("planted crash"), None)
    again = Loop(tmp_path)
    assert again.guard.step == kept.step
    again.train(30)
    assert again.guard._reader.judge.quiet  # type: ignore[attr-defined]
    assert again.guard.step > kept.step + 20
    again.guard.close()


def test_stopped_run_is_saved_and_reported_once(tmp_path: Path) -> None:
    loop = Loop(tmp_path, poison=40, max_consecutive_vetoes=8)
    stops = 0
    with loop.guard:
        for _ in range(40):
            try:
                loop.train(200)
            except TrainingStopped:
                stops += 1
                loop.optimizer.zero_grad()
    assert stops > 20
    newest = max(loop.kept(), key=lambda kept: kept.order)
    assert newest.kind == "emergency"
    events = read(tmp_path).events
    assert len([e for e in events if e["kind"] == "decision" and e["action"] == "stop"]) < 8
    assert len([e for e in events if e.get("name") == "saved"]) <= 3
    again = Loop(tmp_path)
    assert again.guard.step == newest.step
    assert all(p.isfinite().all() for p in again.model.parameters())
    again.guard.close()


def test_healthy_run_is_saved_only_at_its_end(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.train(60)
    loop.guard.close()
    assert [kept.kind for kept in loop.kept()] == ["regular"]


def test_without_snapshots_only_the_stopped_run_is_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = surefoot.attach(model, optimizer, run_dir=tmp_path, resume=True, snapshot_memory=False)
    with pytest.raises(TrainingStopped), guard:
        for i in range(80):
            x = torch.randn(3, 4) * (float("nan") if i > 30 else 1.0)
            guard.watch(model(x).pow(2).mean(), x).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [kept.kind for kept in CheckpointStore(tmp_path / "checkpoints").all()] == ["emergency"]
