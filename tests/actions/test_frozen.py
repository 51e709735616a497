"""A guarded run with frozen weights: snapshot memory, rewinds, and emergency checkpoints that include them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_models import AdapterModel, adapter_run, equal, follow, inputs, state_of, teacher_student_run, train
from scripted_judge import script
from torch import nn

import surefoot
from surefoot.checkpoint.store import CheckpointStore
from surefoot.records import Action

Attach = Callable[..., Any]
Read = Callable[[], surefoot.Run]
TwoProcesses = Callable[..., list[dict[str, Any]]]
BACK = {"action": Action.REWIND}
EVERY4 = surefoot.Policy(snapshot_every=4)
SCRIPT = Path(__file__).parent / "two_rank_frozen_params.py"


def nbytes(tensors: Any) -> int:
    return sum(t.nbytes for t in tensors)


def test_rewind_of_a_run_with_adapters_is_bit_identical(attach: Attach) -> None:
    model, optimizer = adapter_run()
    guard = attach(model, optimizer, policy=EVERY4)
    judge = script(guard, {17: BACK})
    for i in range(20):
        train(model, optimizer, i, guard.watch, 1.0 if i < 16 else 50.0)
    assert judge.rewinds == [(15, 16)]
    for i in range(20, 26):
        train(model, optimizer, i, guard.watch)
    twin = adapter_run()
    for i in [*range(16), *range(20, 26)]:
        train(*twin, i)
    assert equal(state_of(*twin), state_of(model, optimizer))
    ring = guard._recovery.ring
    nbytes_by_storage = {t.untyped_storage().data_ptr(): t.nbytes for s in ring.snapshots for t in s.copy.tensors}
    frozen = nbytes(model.base.parameters())
    assert len(ring.snapshots) == 6
    assert sum(nbytes_by_storage.values()) < frozen * 1.5
    assert ring.nbytes < frozen * 1.5


@pytest.mark.parametrize("how", ["data", "version", "rebind"])
def test_teacher_is_rewound_with_the_run(how: str, attach: Attach, read: Read, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "surefoot")
    model, optimizer = teacher_student_run()
    guard = attach(model, optimizer, policy=EVERY4)
    judge = script(guard, {17: BACK})
    expected = None
    for i in range(18):
        train(model, optimizer, i, guard.watch)
        if i == 15:
            expected = state_of(model, optimizer)  # before the loop moves the teacher, like the snapshot
        follow(model, how)
    train(model, optimizer, 18, guard.watch)
    train(model, optimizer, 19, guard.watch)
    assert judge.rewinds == [(15, 16)]
    assert expected is not None
    assert equal(expected, state_of(model, optimizer))
    guard.close()
    notes = [e for e in read().events if e.get("name") == "ring" and "changed without" in e["detail"]]
    logged = [r for r in caplog.records if "changed without" in r.getMessage()]
    assert len(notes) == len(logged) == (1 if how == "data" else 0)
    assert all(r.levelno == logging.INFO for r in logged)


def test_snapshot_after_an_unnoticed_change_to_frozen_weights_is_not_used(attach: Attach) -> None:
    model, optimizer = adapter_run()
    guard = attach(model, optimizer, policy=EVERY4)
    judge = script(guard, {17: BACK})
    expected = None
    for i in range(20):
        if i == 14:
            model.base.weight.data.mul_(0.5)  # between the snapshots of attempts 11 and 15
        train(model, optimizer, i, guard.watch)
        expected = state_of(model, optimizer) if i == 11 else expected
    assert judge.rewinds == [(11, 12)]
    assert expected is not None
    assert equal(expected, state_of(model, optimizer))
    assert not guard.disabled


def test_unfrozen_weights_are_rewound_to_their_frozen_values(attach: Attach) -> None:
    model, optimizer = adapter_run()
    guard = attach(model, optimizer, policy=EVERY4)
    judge = script(guard, {17: BACK | {"max_attempt": 12}, 27: BACK})
    frozen = model.base.weight.detach().clone()
    for i in range(20):
        if i == 13:
            model.base.requires_grad_(True)
            optimizer.add_param_group({"params": list(model.base.parameters())})
        train(model, optimizer, i, guard.watch)
    assert judge.rewinds == [(11, 12)]
    assert model.base.weight.equal(frozen)
    expected = None
    for i in range(20, 30):
        train(model, optimizer, i, guard.watch)
        ring = guard._recovery.ring
        if ring.snapshots[-1].attempt == i:
            expected = state_of(model, optimizer)
    assert not model.base.weight.equal(frozen)
    assert len(judge.rewinds) == 2
    assert expected is not None
    assert not guard.disabled


def test_emergency_checkpoint_includes_frozen_weights(tmp_path: Path) -> None:
    def attached(model: AdapterModel, optimizer: torch.optim.Optimizer) -> Any:
        policy = surefoot.Policy(
            save_every=10_000,
            snapshot_every=5,
            healthy_steps_to_trust=5,
            max_consecutive_vetoes=500,
            max_failed_actions=50,
            max_actions=50,
        )
        return surefoot.attach(model, optimizer, run_dir=tmp_path, resume=True, policy=policy)

    model, optimizer = adapter_run(width=16)
    guard = attached(model, optimizer)
    frozen = [p.detach().clone() for p in model.base.parameters()]
    for i in range(46):
        x = inputs(i, 16) * (float("nan") if i > 40 else 1.0)
        guard.watch((model(x) - x).square().mean(), x).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert guard._recovery.ring.base_nbytes == nbytes(frozen)
    guard._checkpointer._manager.close()
    (checkpoint,) = CheckpointStore(tmp_path / "checkpoints").all()
    assert checkpoint.kind == "emergency"
    guard.__exit__(RuntimeError, RuntimeError("the plug is pulled"), None)
    other_model, other_optimizer = adapter_run(width=16)
    nn.init.zeros_(other_model.base.weight)
    resumed = attached(other_model, other_optimizer)
    assert resumed.step == checkpoint.step > 0
    assert all(p.equal(was) for p, was in zip(other_model.base.parameters(), frozen, strict=True))
    resumed.close()


# -- two ranks


@pytest.fixture(scope="module")
def results(two_processes: TwoProcesses) -> list[dict[str, Any]]:
    return two_processes(SCRIPT)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks_share_frozen_weights_and_rewind_together(kind: str, results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result[kind] == {"rewinds": [[7, 8]], "on": True, "lost": False, "once": True}


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_both_ranks_use_an_older_snapshot_when_one_lacks_the_newest(kind: str, results: list[dict[str, Any]]) -> None:
    for result in results:
        assert result[f"{kind} moved"] == {"rewinds": [[3, 4]], "on": True, "lost": False, "once": True}
