"""attach in a loop prepared by Accelerate."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

import surefoot
from surefoot.records import Verdict

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'surefoot[hf]'")


@pytest.fixture(autouse=True)
def _own_state():
    """Accelerate keeps its settings for the whole process; each test gets fresh ones."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def train(net, rows, *, run_dir=None, mixed_precision="no", accumulate=1, fused=False, loss_scale=None):
    """Train one epoch; `loss_scale` adds the GradScaler that Accelerate uses on GPUs only. Returns norms and scales."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(
        cpu=True, mixed_precision=mixed_precision, gradient_accumulation_steps=accumulate
    )
    if loss_scale is not None:
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale)
        accelerator.native_amp = True
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)
    model, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(rows, batch_size=4))
    guard = None
    if run_dir is not None:
        guard = surefoot.attach(model, optimizer, run_dir=run_dir, scaler=accelerator.scaler)
    norms, scales = [], []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch)["loss"]
            if guard is not None:
                loss = guard.watch(loss, batch)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
            scales.append(accelerator.scaler and accelerator.scaler.get_scale())
    if guard is not None:
        guard.close()
    return norms, scales


PRECISIONS = [
    pytest.param({}, id="fp32"),
    pytest.param({"mixed_precision": "bf16"}, id="bf16"),
    pytest.param({"mixed_precision": "fp16", "loss_scale": 2.0**12}, id="fp16"),
]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_only_the_bad_update_is_refused(task, tmp_path, precision, accumulate):
    options = {**precision, "accumulate": accumulate}
    bare, guarded, skipped = task.net(), task.net(), task.net()
    train(bare, task.rows(bad_batch=True), **options)
    assert not task.finite(bare)

    train(guarded, task.rows(bad_batch=True), run_dir=tmp_path, **options)
    expected = [Verdict.APPLIED] * (12 // accumulate)
    expected[task.bad_update(accumulate)] = Verdict.NONFINITE
    assert task.verdicts(tmp_path) == expected
    train(skipped, task.rows(without=task.batches_of_bad_update(accumulate)), **options)
    assert task.same(guarded, skipped)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_healthy_run_is_unchanged(task, tmp_path, precision, accumulate, fused):
    options = {**precision, "accumulate": accumulate, "fused": fused}
    bare, guarded = task.net(), task.net()
    norms, _ = train(bare, task.rows(), **options)
    train(guarded, task.rows(), run_dir=tmp_path, **options)
    assert task.same(bare, guarded)
    assert task.verdicts(tmp_path) == [Verdict.APPLIED] * (12 // accumulate)
    assert surefoot.read(tmp_path).scalars["norm"].tolist() == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_loss_scale_overflow_is_no_refusal(task, tmp_path, accumulate, fused):
    options = {"mixed_precision": "fp16", "loss_scale": 2.0**20, "accumulate": accumulate, "fused": fused}
    bare, guarded = task.net(), task.net()
    _, expected = train(bare, task.rows(), **options)
    _, scales = train(guarded, task.rows(), run_dir=tmp_path, **options)
    verdicts = task.verdicts(tmp_path)
    assert scales == expected
    assert len(verdicts) == 12 // accumulate
    assert set(verdicts) == {Verdict.OVERFLOW, Verdict.APPLIED}
    assert task.same(bare, guarded)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("watched", [False, True])
def test_helper_watches_at_backward(task, tmp_path, watched, accumulate):
    """Losses are recorded once, whether the loop watches them itself or not, and the bad update is refused."""
    from surefoot.integrations.accelerate import attach

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    net = task.net()
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=1e-2), DataLoader(task.rows(bad_batch=True), batch_size=4)
    )
    losses = []
    with attach(accelerator, model, optimizer, run_dir=tmp_path) as guard:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch)["loss"]
                if watched:
                    guard.watch(loss, batch)
                losses.append(float(loss.detach()))
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    expected = [Verdict.APPLIED] * (12 // accumulate)
    expected[task.bad_update(accumulate)] = Verdict.NONFINITE
    assert task.verdicts(tmp_path) == expected
    means = [sum(losses[i : i + accumulate]) / accumulate for i in range(0, 12, accumulate)]
    assert surefoot.read(tmp_path).scalars["loss"].tolist() == pytest.approx(means, rel=1e-5, nan_ok=True)
    assert "backward" not in vars(accelerator)
    assert task.finite(net)


def test_guards_state_travels_with_save_state(task, tmp_path):
    from surefoot.integrations.accelerate import attach

    steps = []
    for resumed in (False, True):
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(cpu=True)
        net = task.net()
        model, optimizer, loader = accelerator.prepare(
            net, torch.optim.AdamW(net.parameters()), DataLoader(task.rows(), batch_size=4)
        )
        with attach(accelerator, model, optimizer, run_dir=tmp_path / "run") as guard:
            accelerator.register_for_checkpointing(guard)
            if resumed:
                accelerator.load_state(str(tmp_path / "saved"))
                steps.append((guard.step, guard.history))
                break
            for batch in loader:
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
            accelerator.save_state(str(tmp_path / "saved"))
            steps.append((guard.step, guard.history))
    assert steps[0] == steps[1]
    assert steps[0][0] == 12
