"""A plain loop in float16 with torch's GradScaler."""

from __future__ import annotations

import gc
from itertools import pairwise

import pytest
import torch
from torch import nn

import surefoot
from surefoot.records import Verdict


def train(
    net, batches, *, run_dir=None, pass_scaler=True, unscale=False, fused=False, to_none=True, loss_scale=2.0**13
):
    """Norms of the unscaled gradients of each batch, and the loss scale before and after each batch."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale, growth_interval=5)
    guard = None
    if run_dir is not None:
        if not pass_scaler:
            gc.collect()  # drop the scalers of other tests
        guard = surefoot.attach(net, optimizer, run_dir=run_dir, scaler=scaler if pass_scaler else None)
    norms, scales = [], [loss_scale]
    for batch in batches:
        with torch.autocast("cpu", torch.float16):
            loss = net(**batch)["loss"]
        if guard is not None:
            loss = guard.watch(loss, batch)
        scaler.scale(loss).backward()
        norms.append(float(nn.utils.get_total_norm([p.grad / scaler.get_scale() for p in net.parameters()])))
        if unscale:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=to_none)
        scales.append(scaler.get_scale())
    if guard is not None:
        guard.close()
    return norms, scales


both_optimizers = pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])
scaling = pytest.mark.parametrize(
    ("pass_scaler", "unscale"),
    [(False, False), (True, False), (True, True)],
    ids=["found", "passed", "passed-unscale"],
)
zeroing = pytest.mark.parametrize("to_none", [False, True], ids=["zeroed", "none"])


@both_optimizers
@scaling
def test_recorded_norms_are_of_unscaled_gradients(task, tmp_path, pass_scaler, unscale, fused):
    bare, guarded = task.net(), task.net()
    norms, scales = train(bare, task.batches(), unscale=unscale, fused=fused)
    assert (
        train(guarded, task.batches(), run_dir=tmp_path, pass_scaler=pass_scaler, unscale=unscale, fused=fused)[1]
        == scales
    )
    scalars = surefoot.read(tmp_path).scalars
    assert task.verdicts(tmp_path) == [Verdict.APPLIED] * 12
    assert scalars["norm"].tolist() == pytest.approx(norms, rel=1e-5)
    assert scalars["loss_scale"].tolist() == scales[:-1]
    assert task.same(bare, guarded)


def test_norms_are_close_to_float32(task, tmp_path):
    net, batch = task.net(), task.batches()[0]
    net(**batch)["loss"].backward()
    expected = float(nn.utils.get_total_norm([p.grad for p in net.parameters()]))
    train(task.net(), [batch], run_dir=tmp_path)
    assert surefoot.read(tmp_path).scalars["norm"].tolist() == pytest.approx([expected], rel=0.02)


@both_optimizers
@zeroing
@scaling
def test_overflow_is_no_refusal(task, tmp_path, pass_scaler, unscale, to_none, fused):
    bare, guarded = task.net(), task.net()
    options = {"unscale": unscale, "fused": fused, "to_none": to_none, "loss_scale": 2.0**20}
    _, scales = train(bare, task.batches(), **options)
    assert train(guarded, task.batches(), run_dir=tmp_path, pass_scaler=pass_scaler, **options)[1] == scales
    verdicts = task.verdicts(tmp_path)
    expected_verdicts = [Verdict.OVERFLOW if after < before else Verdict.APPLIED for before, after in pairwise(scales)]
    assert Verdict.OVERFLOW in expected_verdicts
    assert verdicts == expected_verdicts
    assert not [e for e in surefoot.read(tmp_path).events if e["kind"] == "decision"]
    assert surefoot.read(tmp_path).scalars["loss_scale"].tolist() == scales[:-1]
    assert task.same(bare, guarded)


def test_overflow_in_the_last_update_is_recorded(task, tmp_path):
    train(task.net(), task.batches()[:2], run_dir=tmp_path, loss_scale=2.0**30)
    assert task.verdicts(tmp_path) == [Verdict.OVERFLOW] * 2


@both_optimizers
@zeroing
def test_bad_batch_leaves_no_trace(task, tmp_path, to_none, fused):
    """Loss scaling skips the update by itself, but the buffers must be reverted."""
    bare, guarded, skipped = task.net(), task.net(), task.net()
    options = {"to_none": to_none, "fused": fused}
    _, scales = train(bare, task.batches(bad_batch=True), **options)
    assert not task.finite(bare)
    assert train(guarded, task.batches(bad_batch=True), run_dir=tmp_path, **options)[1] == scales
    expected = [Verdict.APPLIED] * 12
    expected[task.bad_update(1)] = Verdict.NONFINITE
    assert task.verdicts(tmp_path) == expected
    train(skipped, task.batches(without=task.batches_of_bad_update(1)), **options)
    assert task.same(guarded, skipped)


def test_ambiguous_scalers_are_noted(task, tmp_path, caplog):
    other = torch.amp.GradScaler("cpu", init_scale=2.0**13)
    other.scale(torch.zeros(()))
    train(task.net(), task.batches(), run_dir=tmp_path, pass_scaler=False)
    assert "scaler=" in caplog.text
    assert [e for e in surefoot.read(tmp_path).events if e.get("name") == "scaler"]


@both_optimizers
def test_clipping_by_value_unscales_first(tmp_path, fused):
    net = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.5, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    before = net.weight.detach().clone()
    with surefoot.attach(net, optimizer, run_dir=tmp_path, scaler=scaler, clip={"value": 0.5}) as guard:
        scaler.scale(guard.watch(net(torch.ones(2, 4)).sum())).backward()
        scaler.step(optimizer)
    assert torch.allclose(before - net.weight, torch.full((1, 4), 0.5))
