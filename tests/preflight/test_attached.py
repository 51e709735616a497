"""`attach(preflight=True)` and `surefoot check script.py`: checked within the first updates, and nothing is changed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from preflight_loops import regression
from torch import Tensor

import surefoot

SCRIPT = """
import torch, surefoot
from torch import nn
import torch.nn.functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

def step_fn(model, batch):
    return {sign}F.mse_loss(model(batch[0]).squeeze(-1), batch[1])

guard = surefoot.attach(model, optimizer, run_dir={run_dir!r}, step_fn=step_fn)
for step in range(1000):
    x = torch.randn(16, 12)
    batch = x, x[:, :3].sum(1)
    loss = guard.watch(step_fn(model, batch), batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("the script went on")
"""


def train(loop: Any, run_dir: Path, *, preflight: bool, steps: int = 12, overwrite: bool = False) -> list[Tensor]:
    step_fn = loop.step_fn
    with surefoot.attach(loop.model, loop.optimizer, run_dir=run_dir, step_fn=step_fn, preflight=preflight) as guard:
        start = [p.detach().clone() for p in loop.model.parameters()]
        for i in range(steps):
            if overwrite:
                with torch.no_grad():
                    for p, value in zip(loop.model.parameters(), start, strict=True):
                        p.copy_(value)
            batch = loop.batches[i]
            loss = guard.watch(step_fn(loop.model, batch), batch)
            loop.optimizer.zero_grad()
            loss.backward()
            loop.optimizer.step()
    return [p.detach().clone() for p in loop.model.parameters()]


def notes(run_dir: Path) -> list[dict[str, Any]]:
    events = surefoot.read(run_dir).events
    return [dict(e["values"]) for e in events if e["kind"] == "note" and e["name"] == "preflight"]


def test_a_checked_run_is_the_same_run(tmp_path: Path) -> None:
    bare = train(regression(), tmp_path / "bare", preflight=False)
    checked = train(regression(), tmp_path / "checked", preflight=True)
    assert all(map(torch.equal, bare, checked))
    assert notes(tmp_path / "bare") == []
    (note,) = notes(tmp_path / "checked")
    assert note["passed"]


def test_weights_that_are_put_back_between_steps(tmp_path: Path) -> None:
    train(regression(), tmp_path, preflight=True, overwrite=True)
    (note,) = notes(tmp_path)
    assert "weights_overwritten" in [f["cause"] for f in note["findings"] if f["certainty"] == "sure"]


def test_a_script_is_checked_and_ends_there(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    for sign, code in (("", 0), ("-", 1)):
        script.write_text(SCRIPT.format(sign=sign, run_dir=str(tmp_path / "run")))
        command = [sys.executable, "-m", "surefoot", "check", str(script), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        causes = [f["cause"] for f in json.loads(done.stdout)["findings"]]
        assert ("loss_function" in causes) == (code == 1)
        assert "the script went on" not in done.stdout + done.stderr
    assert not (tmp_path / "run").exists()
