"""The guard as a user sees it: refusals, counting, stopping, closing, attaching again."""

from __future__ import annotations

import copy
import gc
import logging
import math
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loops import bare, batch, hooks_on, loss_of, net, same, snapshot, train
from torch import nn

import surefoot
from surefoot.records import Verdict

Attach = Callable[..., Any]
Read = Callable[[], surefoot.Run]
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3),
    "fused AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True),
    "SGD": lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9),
}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return OPTIMIZERS["SGD"](model)


# -- refusing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("fault", ["nan", "inf"])
@pytest.mark.parametrize("healthy", [0, 3])
def test_nonfinite_batch_leaves_no_trace(name: str, fault: str, healthy: int, attach: Attach) -> None:
    model = net()
    optimizer = OPTIMIZERS[name](model)
    guard = attach(model, optimizer)
    for i in range(healthy):
        train(model, optimizer, guard.watch, i)
    before = snapshot(model, optimizer)
    for i in range(3):
        train(model, optimizer, guard.watch, i, fault)
        assert same(before[0], snapshot(model)[0])
        assert same(before, snapshot(model, optimizer))
    train(model, optimizer, guard.watch, 9)
    assert not same(before[0], snapshot(model)[0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_run_with_refused_batches_equals_the_run_without_them(name: str, attach: Attach) -> None:
    model, other = net(), net()
    optimizer, plain = OPTIMIZERS[name](model), OPTIMIZERS[name](other)
    guard = attach(model, optimizer)
    for i in range(30):
        train(model, optimizer, guard.watch, i)
        train(other, plain, bare, i)
        if i % 7 == 3:
            train(model, optimizer, guard.watch, 99, "nan")
    assert same(snapshot(model, optimizer), snapshot(other, plain))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_norm_outlier_is_refused_after_warmup(name: str, attach: Attach, read: Read) -> None:
    model = net()
    optimizer = OPTIMIZERS[name](model)
    guard = attach(model, optimizer)
    for i in range(25):
        train(model, optimizer, guard.watch, i)
    before = snapshot(model, optimizer)
    train(model, optimizer, guard.watch, 25, "burst")
    assert same(before, snapshot(model, optimizer))
    train(model, optimizer, guard.watch, 26)
    guard.close()
    rows = read().scalars
    assert rows["verdict"].tolist() == [0] * 25 + [Verdict.NORM_OUTLIER, 0]
    assert np.isnan(rows["norm_limit"][:20]).all(), "no limit while the baseline forms"
    assert rows["norm"][25] > 100 * rows["norm"][:25].max()
    assert rows["norm_limit"][25] == pytest.approx(100 * rows["norm"][:25].max(), rel=0.05)
    assert rows["norm"][26] < rows["norm_limit"][26] < rows["norm"][25], "a refused norm does not move the baseline"


def test_finite_gradient_is_applied_during_warmup(attach: Attach, read: Read) -> None:
    model = net()
    optimizer = sgd(model)
    guard = attach(model, optimizer)
    train(model, optimizer, guard.watch, 0)
    x = batch(1)
    guard.watch(loss_of(model, x) * 1e3, x).backward()
    optimizer.step()
    guard.close()
    assert read().scalars["verdict"].tolist() == [0, 0]


def test_policy_thresholds_are_used(attach: Attach, read: Read) -> None:
    model = net()
    optimizer = sgd(model)
    guard = attach(model, optimizer, policy=surefoot.Policy(max_norm_ratio=math.inf, warmup=1))
    for i in range(5):
        train(model, optimizer, guard.watch, i)
    train(model, torch.optim.SGD(model.parameters(), lr=0.0), bare, 0)
    x = batch(1)
    guard.watch(loss_of(model, x) * 1e4, x).backward()
    optimizer.step()
    guard.close()
    assert read().scalars["verdict"].tolist() == [0] * 6


def test_observe_changes_nothing_and_records_its_decisions(
    attach: Attach, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    model, other = net(), net()
    optimizer, plain = sgd(model), sgd(other)
    guard = attach(model, optimizer, policy="observe", clip=1e-3)
    faults = {22: "burst", 25: "nan"}
    for i in range(30):
        train(model, optimizer, guard.watch, i, faults.get(i))
        train(other, plain, bare, i, faults.get(i))
        assert same(snapshot(model, optimizer), snapshot(other, plain))
    guard.close()
    assert "would have refused" in caplog.text
    run = read()
    assert run.scalars["verdict"][22] == Verdict.NORM_OUTLIER
    refusals = [e for e in run.events if e["kind"] == "decision" and e["action"] == "refuse"]
    assert refusals
    assert not any(e["applied"] for e in refusals)


def test_observed_updates_count_as_applied(attach: Attach, read: Read) -> None:
    model = net()
    optimizer = sgd(model)
    guard = attach(model, optimizer, policy="observe")
    for i in range(25):
        train(model, optimizer, guard.watch, i, "burst" if i == 22 else None)
    guard.close()
    assert read().scalars["step"].tolist() == list(range(25)), "an update that was not refused counts as applied"
    assert guard.step == 25


# -- stopping ---------------------------------------------------------------------------------------------------------


def test_consecutive_refusals_stop_the_run_with_a_reason(attach: Attach, read: Read) -> None:
    model = net()
    optimizer = sgd(model)
    guard = attach(model, optimizer, policy=surefoot.Policy(max_consecutive_vetoes=2))
    for i in range(3):
        train(model, optimizer, guard.watch, i)
    before = snapshot(model, optimizer)
    updates = 0
    with pytest.raises(surefoot.TrainingStopped) as caught:
        for i in range(50):
            train(model, optimizer, guard.watch, i, "nan")
            updates += 1
    assert updates == 2 + 2 - 1, "the second refusal is known two steps later"
    message = str(caught.value)
    for word in ("2 updates in a row", "step 3", "attempt 4", "the loss is nan", "weights"):
        assert word in message.replace("Weights", "weights")
    assert same(before, snapshot(model, optimizer))
    guard.close()
    run = read()
    assert run.scalars["attempt"].tolist() == list(range(3 + 4)), "no row is missing"
    stops = [e for e in run.events if e["kind"] == "decision" and e["action"] == "stop"]
    assert stops[0]["attempt"] == 4
    assert stops[0]["reason"] in message


def test_stop_reason_does_not_claim_unchanged_weights_falsely(attach: Attach) -> None:
    model = net()
    optimizer = sgd(model)
    guard = attach(model, optimizer, policy=surefoot.Policy(max_consecutive_vetoes=2))
    for i, fault in enumerate([None, "nan", "nan"]):
        train(model, optimizer, guard.watch, i, fault)
    before = snapshot(model, optimizer)
    with pytest.raises(surefoot.TrainingStopped) as caught:
        for i in range(10):
            train(model, optimizer, guard.watch, i)
    changed = not same(before, snapshot(model, optimizer))
    assert not (changed and "Weights and optimizer are as they were" in str(caught.value))


def test_applied_step_resets_the_refusal_count(attach: Attach) -> None:
    model = net()
    optimizer = sgd(model)
    guard = attach(model, optimizer, policy=surefoot.Policy(max_consecutive_vetoes=3))
    for i in range(30):
        train(model, optimizer, guard.watch, i, None if i % 3 == 2 else "nan")
    guard.close()
    assert guard.step == 10


def test_stopped_run_that_continues_is_stopped_again(attach: Attach) -> None:
    model = net()
    optimizer = sgd(model)
    guard = attach(model, optimizer, policy=surefoot.Policy(max_consecutive_vetoes=1))
    stopped = 0
    for i in range(6):
        try:
            train(model, optimizer, guard.watch, i, "nan")
        except surefoot.TrainingStopped:
            stopped += 1
            optimizer.zero_grad()
    assert stopped == 4


# -- counting ---------------------------------------------------------------------------------------------------------


def test_refused_updates_count_as_attempts_not_steps(attach: Attach, read: Read) -> None:
    model = net()
    optimizer = sgd(model)
    guard = attach(model, optimizer)
    faults = [None, "nan", None, "nan", "nan", None]
    for i, fault in enumerate(faults):
        train(model, optimizer, guard.watch, i, fault)
    guard.close()
    rows = read().scalars
    assert rows["attempt"].tolist() == [0, 1, 2, 3, 4, 5]
    assert rows["step"].tolist() == [0, 1, 1, 2, 2, 2]
    assert guard.step == 3


def test_metrics_are_read_exactly_two_steps_later(attach: Attach) -> None:
    model = net()
    optimizer = sgd(model)
    guard = attach(model, optimizer)
    for i in range(10):
        assert guard.step == max(i - 2, 0)
        assert [len(kept) for kept in guard.history] == [max(i - 2, 0)] * 2
        train(model, optimizer, guard.watch, i)
    guard.close()
    assert guard.step == 10


def test_row_contains_the_metrics_of_its_update(attach: Attach, read: Read) -> None:
    model = net()
    optimizer = sgd(model)
    guard = attach(model, optimizer)
    losses, norms = [], []
    for i in range(4):
        x = batch(i)
        loss = guard.watch(loss_of(model, x), x)
        loss.backward()
        losses.append(loss.item())
        norms.append(float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])))
        optimizer.step()
        optimizer.zero_grad()
    guard.close()
    run = read()
    rows = run.scalars
    assert rows["loss"].tolist() == pytest.approx(losses, rel=1e-6)
    assert rows["norm"].tolist() == pytest.approx(norms, rel=1e-6)
    assert rows["loss_d1"][1:].tolist() == pytest.approx(np.diff(losses).tolist(), rel=1e-4, abs=1e-6)
    assert rows["loss_d2"][2:].tolist() == pytest.approx(np.diff(losses, 2).tolist(), rel=1e-3, abs=1e-6)
    assert rows["lr"].tolist() == pytest.approx([0.01] * 4)
    assert rows["samples"].tolist() == [16.0] * 4
    assert rows["num_microbatches"].tolist() == [1] * 4
    assert rows["nonfinite"].tolist() == [0.0] * 4
    assert np.isnan(rows["clip"]).all()
    assert np.isnan(rows["clip_factor"]).all()
    assert np.isnan(rows["loss_scale"]).all()
    assert (rows["seconds"][1:] >= rows["data_wait"][1:]).all()
    assert (np.diff(rows["time"]) >= 0).all()
    assert list(run.layers) == [name for name, _ in model.named_parameters()]
    squares = sum(run.layers[name]["norm"].astype(float) ** 2 for name in run.layers)
    assert np.sqrt(squares).tolist() == pytest.approx(norms, rel=1e-5)


def test_history_has_the_last_hundred_losses_and_norms(attach: Attach) -> None:
    model = net()
    optimizer = sgd(model)
    guard = attach(model, optimizer)
    losses = [train(model, optimizer, guard.watch, i).item() for i in range(130)]
    guard.close()
    kept, norms = guard.history
    assert kept == pytest.approx(losses[-100:], rel=1e-6)
    assert len(norms) == 100
    assert all(norm > 0 for norm in norms)


def test_weights_are_measured_at_intervals(attach: Attach, read: Read) -> None:
    model = net()
    optimizer = sgd(model)
    guard = attach(model, optimizer, policy=surefoot.Policy(weights_every=3))
    norms, ratios = [], []
    for i in range(8):
        before = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        train(model, optimizer, guard.watch, i)
        after = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        ratios.append(float((after - before).norm() / after.norm()))
        norms.append(float(nn.utils.get_total_norm([p.detach() for p in model.parameters()])))
    guard.close()
    rows = read().scalars
    measured = [1, 4, 7]
    assert np.flatnonzero(~np.isnan(rows["weight_norm"])).tolist() == measured
    assert rows["weight_norm"][measured].tolist() == pytest.approx([norms[0], norms[3], norms[6]], rel=1e-5)
    assert rows["update_ratio"][measured].tolist() == pytest.approx([ratios[0], ratios[3], ratios[6]], rel=1e-4)
    assert rows["nonfinite_params"][measured].tolist() == [0.0] * 3


def test_nonfinite_weights_are_found(attach: Attach, read: Read) -> None:
    model = net()
    optimizer = sgd(model)
    guard = attach(model, optimizer, policy=surefoot.Policy(weights_every=1))
    for i in range(3):
        train(model, optimizer, guard.watch, i)
    with torch.no_grad():
        model.last.weight[0, 0] = math.nan
    for i in range(3):
        train(model, optimizer, guard.watch, i)
    guard.close()
    findings = [e for e in read().events if e["kind"] == "finding"]
    assert any("1 values in weights or buffers" in e["detail"] for e in findings)


def test_tensors_with_nonfinite_gradients_are_named(
    attach: Attach, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    optimizer = sgd(model)
    guard = attach(model, optimizer)
    train(model, optimizer, guard.watch, 0)
    loss = guard.watch(loss_of(model, batch(1)), batch(1))
    model.last.bias.register_hook(lambda g: g * math.nan)
    loss.backward()
    optimizer.step()
    guard.close()
    notes = [e for e in read().events if e.get("name") == "tensors"]
    assert [t["name"] for t in notes[0]["values"]["tensors"]] == ["last.bias"]
    assert (notes[0]["step"], notes[0]["attempt"]) == (1, 1)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "step 1: 1 gradient values are not finite" in record.getMessage()
    assert "tensors last.bias" in record.getMessage()
    assert "refused the update: weights and optimizer state are unchanged" in record.getMessage()


# -- watching and reporting -------------------------------------------------------------------------------------------


def test_watch_returns_the_same_tensor(attach: Attach) -> None:
    model = net()
    optimizer = sgd(model)
    guard = attach(model, optimizer)
    loss = loss_of(model, batch(0))
    graph = loss.grad_fn
    assert guard.watch(loss, batch(0)) is loss
    assert loss.grad_fn is graph
    guard.close()
    loss = loss_of(model, batch(1))
    assert guard.watch(loss) is loss, "also after close"


def test_loss_under_no_grad_is_returned_and_not_recorded(attach: Attach, read: Read) -> None:
    model = net()
    optimizer = sgd(model)
    guard = attach(model, optimizer)
    for i in range(3):
        train(model, optimizer, guard.watch, i)
        with torch.no_grad():
            loss = loss_of(model, batch(i))
            assert guard.watch(loss, batch(i)) is loss
    guard.close()
    rows = read().scalars
    assert rows["attempt"].tolist() == [0, 1, 2]
    assert rows["num_microbatches"].tolist() == [1, 1, 1]
    assert rows["samples"].tolist() == [16.0] * 3


def test_reports_are_recorded(attach: Attach, read: Read) -> None:
    model = net()
    optimizer = sgd(model)
    guard = attach(model, optimizer)
    guard.report(total_steps=5)
    for i in range(5):
        guard.report(tokens=100)
        guard.report(tokens=28)
        train(model, optimizer, guard.watch, i)
    guard.report(eval_loss=0.5, accuracy=np.float32(0.25), perplexity=torch.tensor(1.5))
    guard.close()
    run = read()
    assert run.scalars["tokens"].tolist() == [128.0] * 5
    left = run.scalars["seconds_left"]
    assert left[3] > 0
    values = [e["values"] for e in run.events if e.get("name") == "report"]
    assert values == [{"total_steps": 5}, {"eval_loss": 0.5, "accuracy": 0.25, "perplexity": 1.5}]


def test_report_accepts_scalar_tensors_and_numpy_numbers(
    attach: Attach, read: Read, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    guard = attach(model, sgd(model))
    torch.set_warn_always(True)  # torch warns only once when a tensor with a graph becomes a number
    try:
        guard.report(loss=loss_of(model, batch(0)), count=torch.tensor([3]), share=np.float64(0.5))
    finally:
        torch.set_warn_always(False)
    with pytest.raises(ValueError, match="losses"):
        guard.report(losses=torch.ones(2))
    guard.close()
    (values,) = [e["values"] for e in read().events if e.get("name") == "report"]
    assert values["loss"] > 0
    assert (values["count"], values["share"]) == (3.0, 0.5)
    assert caplog.records == []


@pytest.mark.parametrize("name", ["name", "detail", "at", "loss"])
def test_report_accepts_any_name(name: str, attach: Attach, read: Read) -> None:
    model = net()
    guard = attach(model, sgd(model))
    guard.report(**{name: 2.5})
    guard.close()
    events = read().events
    assert not [e for e in events if e.get("name") == "degraded"]
    assert [e["values"] for e in events if e.get("name") == "report"] == [{name: 2.5}]


# -- attach and close -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["off", "OFF", "0", "false"])
def test_surefoot_off_does_nothing(word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUREFOOT", word)
    model, other = net(), net()
    optimizer, plain = sgd(model), sgd(other)
    with surefoot.attach(model, optimizer, run_dir=tmp_path / "run", clip=1e-6) as guard:
        loss = model.first.weight.sum()
        assert guard.watch(loss, batch(0)) is loss
        assert loss._backward_hooks is None
        assert hooks_on(model, optimizer) == []
        guard.report(eval_loss=1.0)
        for i in range(4):
            train(model, optimizer, guard.watch, i)
            train(other, plain, bare, i)
        assert guard.step == 0
    assert same(snapshot(model, optimizer), snapshot(other, plain))
    assert list(tmp_path.iterdir()) == []


def test_off_guard_has_the_same_attributes(attach: Attach, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    live = attach(model, sgd(model))
    monkeypatch.setenv("SUREFOOT", "off")
    idle = attach(model, sgd(model))
    for name in ("step", "history"):
        assert type(getattr(idle, name)) is type(getattr(live, name))


def test_any_other_value_of_surefoot_switches_it_on(
    attach: Attach, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SUREFOOT", "on")
    model = net()
    attach(model, sgd(model))
    assert (tmp_path / "run" / "run.json").exists()


def test_with_block_closes_the_guard(tmp_path: Path) -> None:
    model = net()
    optimizer = sgd(model)
    with surefoot.attach(model, optimizer, run_dir=tmp_path) as guard:
        for i in range(5):
            train(model, optimizer, guard.watch, i)
        assert hooks_on(model, optimizer)
    assert hooks_on(model, optimizer) == []
    assert guard.step == 5
    run = surefoot.read(tmp_path)
    assert run.scalars.rows == 5
    assert [e["name"] for e in run.events if e["kind"] == "note"] == ["attached", "ring", "closed"]
    assert not (tmp_path / "writer.lock").exists()


def test_exception_in_a_with_block_is_recorded(tmp_path: Path) -> None:
    model = net()
    optimizer = sgd(model)
    with (
        pytest.raises(ZeroDivisionError),
        surefoot.attach(model, optimizer, run_dir=tmp_path) as guard,
    ):
        train(model, optimizer, guard.watch, 0)
        raise ZeroDivisionError("by zero")
    assert hooks_on(model, optimizer) == []
    notes = [e for e in surefoot.read(tmp_path).events if e.get("name") == "exception"]
    assert notes[0]["detail"] == "ZeroDivisionError: by zero"


def test_close_removes_all_hooks_and_is_idempotent(attach: Attach, read: Read) -> None:
    model, other = net(), net()
    optimizer, plain = sgd(model), sgd(other)
    guard = attach(model, optimizer)
    watched = guard.watch(loss_of(model, batch(0)), batch(0))
    guard.close()
    guard.close()
    assert hooks_on(model, optimizer) == []
    rows = read().scalars.rows
    watched.backward()
    optimizer.step()
    optimizer.zero_grad()
    train(other, plain, bare, 0)
    for i in range(1, 4):
        train(model, optimizer, guard.watch, i)
        train(other, plain, bare, i)
    guard.report(eval_loss=1.0)
    assert same(snapshot(model, optimizer), snapshot(other, plain))
    assert read().scalars.rows == rows == 0


def test_attempts_continue_after_attaching_again(attach: Attach, read: Read) -> None:
    model = net()
    optimizer = sgd(model)
    for turn in range(3):
        guard = attach(model, optimizer)
        for i in range(4):
            train(model, optimizer, guard.watch, i, "nan" if i == 1 else None)
        guard.close()
        assert read().scalars["attempt"].tolist() == list(range(4 * (turn + 1)))
    assert read().scalars["step"].tolist() == [0, 1, 1, 2] * 3
    assert len(read().info["earlier"]) == 2


def test_no_weight_stats_carry_over_to_the_next_attach(attach: Attach, read: Read) -> None:
    model = net()
    optimizer = sgd(model)
    for _ in range(2):
        guard = attach(model, optimizer, policy=surefoot.Policy(weights_every=2))
        for i in range(3):
            train(model, optimizer, guard.watch, i)
        guard.close()
    norms = read().scalars["weight_norm"]
    assert (np.isnan(norms) | (norms > 0.1)).all(), "a norm of 0 would be an uninitialized value"


def test_kept_loss_does_not_keep_its_batch_alive(attach: Attach) -> None:
    model = net()
    optimizer = sgd(model)
    guard = attach(model, optimizer)
    kept: list[torch.Tensor] = []
    batches: list[weakref.ref[torch.Tensor]] = []
    for i in range(3):
        x = batch(i)
        batches.append(weakref.ref(x))
        loss = guard.watch(loss_of(model, x), {"x": x})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        kept.append(loss)  # a common mistake, harmless as long as the graph has been freed
        del x, loss
    gc.collect()
    assert [alive() for alive in batches] == [None] * 3


def test_garbage_collected_guard_releases_model_and_run_dir(tmp_path: Path) -> None:
    def use() -> weakref.ref[nn.Module]:
        model = net()
        optimizer = sgd(model)
        guard = surefoot.attach(model, optimizer, run_dir=tmp_path)
        for i in range(3):
            train(model, optimizer, guard.watch, i)
        return weakref.ref(model)

    for _ in range(2):  # twice, because the run directory must be free again
        model = use()
        gc.collect()
        assert model() is None


def test_guarded_model_can_be_copied_and_saved(attach: Attach, tmp_path: Path) -> None:
    model = net()
    optimizer = sgd(model)
    guard = attach(model, optimizer)
    train(model, optimizer, guard.watch, 0)
    copied = copy.deepcopy(model)
    copied(batch(0))
    copied.load_state_dict(model.state_dict())
    assert hooks_on(copied) == [] or copied._forward_pre_hooks is not model._forward_pre_hooks
    pickle.loads(pickle.dumps(model))
    torch.save(model, tmp_path / "model.pt")
    pickle.dumps(optimizer)
    copy.deepcopy(optimizer)
