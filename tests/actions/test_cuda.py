"""Actions on CUDA: ceilings and lr without a host sync, snapshots on the device and in host memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_models import AdapterModel, equal, inputs, state_of
from loops import net, same, snapshot
from scripted_judge import Watched, script, set_overrides

import surefoot
from benchmarks.host_syncs import count_host_syncs
from surefoot.checkpoint import snapshot_memory
from surefoot.models.decoder import SIZES, Decoder, next_token_loss
from surefoot.records import Action

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
Attach = Callable[..., Any]
Read = Callable[[], surefoot.Run]
EVERY4 = surefoot.Policy(snapshot_every=4)


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize(("implementation", "scaled"), [("plain", False), ("fused", False), ("fused", True)])
def test_rewind_is_bit_identical_on_cuda(
    implementation: str, scaled: bool, where: str, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "host":  # as when the device is full
        real_free_bytes = snapshot_memory.free_bytes
        monkeypatch.setattr(
            snapshot_memory, "free_bytes", lambda device: 0 if device.type == "cuda" else real_free_bytes(device)
        )

    def build() -> Watched:
        return Watched("AdamW", implementation, device="cuda", scaled=scaled).scheduled()

    run = build()
    guard = attach(run.model, run.optimizer, policy=EVERY4, scheduler=run.schedulers, scaler=run.scaler)
    run.watch = guard.watch
    judge = script(guard, {9: {"action": Action.REWIND}})
    for i in range(12):
        run.train(i, 1.0 if i < 8 else 50.0)
    assert judge.rewinds == [(7, 8)]
    assert {s.copy.location for s in guard._recovery.ring.snapshots} == {where}
    for i in range(12, 20):
        run.train(i)
    twin = build()
    for i in [*range(8), *range(12, 20)]:
        twin.train(i)
    for param, expected_param in zip(run.model.parameters(), twin.model.parameters(), strict=True):
        torch.testing.assert_close(param, expected_param, rtol=1e-5, atol=1e-7)  # products on a GPU may differ by a bit


@pytest.mark.parametrize("what", ["norm", "loss"])
def test_norm_and_loss_ceilings_refuse_on_the_device(what: str, attach: Attach, read: Read) -> None:
    model = net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    guard = attach(model, optimizer)
    script(guard, {})

    def train(i: int, factor: float = 1.0) -> None:
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(i)).cuda()
        guard.watch((model(x) - x.sum(1)).square().mean() * factor, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    for i in range(4):
        train(i)
    top = 1000.0
    set_overrides(guard, norm_ceiling=(top if what == "norm" else 1e9,), loss_ceiling=1e9 if what == "norm" else top)
    before = snapshot(model, optimizer)
    train(4, 1e6)
    assert same(before, snapshot(model, optimizer))
    train(5)
    assert not same(before, snapshot(model, optimizer))
    set_overrides(guard)
    train(6, 1e6)
    guard.close()
    assert read().scalars["verdict"].tolist() == [0] * 4 + [2, 0, 0]


@pytest.mark.parametrize("moved", [False, True])
@pytest.mark.parametrize("where", ["device", "host"])
def test_snapshots_share_one_copy_of_frozen_weights(
    where: str, moved: bool, attach: Attach, read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "host":
        real_free_bytes = snapshot_memory.free_bytes
        monkeypatch.setattr(
            snapshot_memory, "free_bytes", lambda device: 0 if device.type == "cuda" else real_free_bytes(device)
        )
    torch.manual_seed(0)
    model = AdapterModel(512, torch.bfloat16).cuda()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01, fused=True)
    guard = attach(model, optimizer, policy=EVERY4)
    judge = script(guard, {17: {"action": Action.REWIND}})
    expected: Any = None
    for i in range(20):
        if moved and i == 14:  # between the snapshots of attempts 11 and 15
            model.base.weight.data.neg_()
        x = inputs(i, 512).cuda()
        guard.watch((model(x) - x).square().mean(), x).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()  # host snapshots are taken as soon as their memory is allocated
        while guard._recovery.ring._allocating is not None and not guard._recovery.ring._allocating.done:
            time.sleep(0.001)
        expected = state_of(model, optimizer)[:-1] if i == (11 if moved else 15) else expected
    ring = guard._recovery.ring
    assert judge.rewinds == [(11, 12) if moved else (15, 16)]
    assert equal(expected, state_of(model, optimizer)[:-1])
    assert {s.copy.location for s in ring.snapshots} == {where}
    assert ring.base_nbytes <= sum(p.nbytes for p in model.base.parameters())
    assert len(ring.snapshots) >= 3
    assert not guard.disabled
    guard.close()
    events = [e for e in read().events if e.get("name") == "ring" and "base.weight" in e["detail"]]
    assert len(events) == moved


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("tensor", [False, True])
def test_no_more_host_syncs_than_the_bare_loop(tensor: bool, frozen: bool, tmp_path: Path) -> None:
    model = Decoder(SIZES["tiny"]).cuda()
    if frozen:
        for p in list(model.parameters())[1:-4]:
            p.requires_grad_(False)
    lr = torch.tensor(1e-3, device="cuda") if tensor else 1e-3
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr, fused=True)
    batch = torch.randint(0, 256, (4, 65), device="cuda")

    def bare() -> None:
        next_token_loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    def attached() -> None:
        guard.watch(next_token_loss(model, batch), batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        bare()
    before = count_host_syncs(bare, steps=20)
    guard: Any = surefoot.attach(model, optimizer, run_dir=tmp_path, policy=surefoot.Policy(snapshot_every=5))
    for _ in range(7):
        attached()
    set_overrides(
        guard,
        lr_factor=0.5,
        rewarmup_steps=10,
        max_lr=(5e-4,),
        max_momentum=(0.8,),
        clip=(0.5,),
        norm_ceiling=(math.inf,),
    )
    assert count_host_syncs(attached, steps=20) <= before
    assert not guard.disabled
    guard.close()
