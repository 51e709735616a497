"""An internal error or a full disk ends protection or the journal, never the training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import Net, bare, batch, hooks_on, loss_of, net, same, snapshot, train
from torch import Tensor

import surefoot
from surefoot.checkpoint.buffers import BufferShadow
from surefoot.checkpoint.snapshots import SnapshotRing
from surefoot.gate.gate import Gate
from surefoot.guard import attached
from surefoot.guard.metrics_reader import MetricsReader
from surefoot.guard.recovery import Recovery
from surefoot.guard.step_pipeline import StepPipeline
from surefoot.judge.judge import Judge
from surefoot.measure.block_layout import AsyncReadback
from surefoot.measure.grad_stats import GradStats, SeenGrads
from surefoot.measure.resources import StepTimer, SystemMonitor
from surefoot.measure.weight_stats import UpdateSample

Attach = Callable[..., Any]
Read = Callable[[], surefoot.Run]

PLACES: dict[str, tuple[Any, str]] = {
    "counting samples": (attached, "count_samples"),
    "timing the forward pass": (StepTimer, "forward_began"),
    "timing the step": (StepTimer, "step_ended"),
    "finding stale gradients": (StepPipeline, "find_stale_grads"),
    "measuring gradients": (GradStats, "measure"),
    "detecting stale gradients": (SeenGrads, "unchanged"),
    "sampling the weights": (UpdateSample, "take"),
    "comparing the weights": (UpdateSample, "compare"),
    "measuring the weights": (GradStats, "measure_weights"),
    "before the step": (Gate, "before_step"),
    "applying the verdict": (Gate, "apply"),
    "reverting the buffers": (BufferShadow, "commit_or_revert"),
    "reading memory and utilisation": (SystemMonitor, "read"),
    "sending": (AsyncReadback, "send"),
    "receiving": (AsyncReadback, "receive"),
    "judging": (Judge, "update"),
    "reading a row": (MetricsReader, "read"),
    "taking a snapshot": (SnapshotRing, "take"),
    "waiting for a snapshot": (SnapshotRing, "before_update"),
    "following snapshots": (Recovery, "row_read"),
    "preparing overrides": (Recovery, "before_step"),
    "the end of an iteration": (Recovery, "iteration_ended"),
}


def break_after(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, calls: int) -> None:
    """Make a method of surefoot raise after `calls` calls."""
    original, seen = getattr(owner, name), [0]

    def broken(*args: Any, **kwargs: Any) -> Any:
        seen[0] += 1
        if seen[0] > calls:
            raise RuntimeError("planted")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, broken)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("calls", [0, 4])
@pytest.mark.parametrize("place", PLACES)
def test_internal_error_switches_protection_off_and_training_continues(
    place: str,
    calls: int,
    fused: bool,
    attach: Attach,
    read: Read,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, other = net(), net()
    optimizer, plain = (torch.optim.AdamW(m.parameters(), lr=1e-3, fused=fused) for m in (model, other))
    guard = attach(model, optimizer, policy=surefoot.Policy(weights_every=1, snapshot_every=1))
    break_after(monkeypatch, *PLACES[place], calls)
    for i in range(12):
        mine = train(model, optimizer, guard.watch, i)
        theirs = train(other, plain, bare, i)
        assert torch.equal(mine, theirs)
    assert same(snapshot(model, optimizer), snapshot(other, plain))
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1, "logged once"
    assert "protection is OFF" in errors[0]
    assert "planted" in errors[0]
    guard.close()
    assert hooks_on(model, optimizer) == []
    degraded = [e for e in read().events if e.get("name") == "degraded"]
    assert len(degraded) == 1
    assert "RuntimeError" in degraded[0]["detail"]
    assert "planted" in degraded[0]["detail"]


def test_error_during_a_refused_step_leaves_the_gradients_in_place(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = attach(model, optimizer)
    train(model, optimizer, guard.watch, 0)
    original = Gate.hide_grads

    def failing_hide_grads(self: Gate) -> None:
        original(self)
        raise RuntimeError("planted")

    monkeypatch.setattr(Gate, "hide_grads", failing_hide_grads)
    guard.watch(loss_of(model, batch(1), "nan"), batch(1)).backward()
    optimizer.step()
    assert all(p.grad is not None for p in model.parameters())
    assert "protection is OFF" in caplog.text


def test_closure_still_runs_after_an_error_in_the_gate(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, other = net(), net()
    optimizer, plain = (torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=3) for m in (model, other))
    guard = attach(model, optimizer)
    break_after(monkeypatch, StepPipeline, "decide", 1)

    def step(m: Net, o: torch.optim.Optimizer, watch: Callable[..., Tensor], i: int) -> None:
        def closure() -> Tensor:
            o.zero_grad()
            loss = watch(loss_of(m, batch(i)), batch(i))
            loss.backward()
            return loss

        o.step(closure)

    for i in range(4):
        step(model, optimizer, guard.watch, i)
        step(other, plain, bare, i)
    assert same(snapshot(model, optimizer), snapshot(other, plain))
    assert "protection is OFF" in caplog.text


def test_user_error_propagates_and_the_protection_stays(attach: Attach, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard = attach(model, optimizer)
    loss = guard.watch(loss_of(model, batch(0)), batch(0))
    hook = model.last.weight.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    hook.remove()
    optimizer.zero_grad()
    with pytest.raises(ZeroDivisionError):
        optimizer.step(lambda: 1 / 0)
    optimizer.zero_grad()
    train(model, optimizer, guard.watch, 0)
    before = snapshot(model, optimizer)
    train(model, optimizer, guard.watch, 1, "nan")
    assert same(before, snapshot(model, optimizer)), "protection stays on"
    assert "protection is OFF" not in caplog.text


@pytest.mark.parametrize("file", ["events.jsonl", "signals/scalars-000000.bin", "signals/layers-000000.bin"])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_full_disk_stops_only_the_journal(
    file: str, attach: Attach, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = tmp_path / "run" / file
    target.parent.mkdir(parents=True)
    target.symlink_to("/dev/full")
    model, other = net(), net()
    optimizer, plain = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, other))
    guard = attach(model, optimizer)
    for i in range(20):
        train(model, optimizer, guard.watch, i)
        train(other, plain, bare, i)
    assert same(snapshot(model, optimizer), snapshot(other, plain))
    before = snapshot(model, optimizer)
    train(model, optimizer, guard.watch, 20, "nan")
    assert same(before, snapshot(model, optimizer)), "protection stays on"
    guard.close()
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1
    assert "journal has stopped" in errors[0]
    assert "No space left" in errors[0] or "full" in errors[0]
    assert guard.step == 20
