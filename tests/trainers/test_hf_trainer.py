"""attach inside HF Trainer, which does the clipping, accumulation and mixed precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import surefoot
from surefoot.records import Verdict

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install 'surefoot[hf]'")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'surefoot[hf]'")


class Attach(transformers.TrainerCallback):
    """Attaches at the start of training and closes the guard at its end."""

    guard: surefoot.Guard | None = None

    def __init__(self, **options: Any) -> None:
        self._options = options

    def on_train_begin(self, args, state, control, *, model, optimizer, **_):
        self.guard = surefoot.attach(model, optimizer, **self._options)

    def on_train_end(self, args, state, control, **_):
        self.guard.close()


class AttachAndWatch(Attach):
    """Needs no Trainer subclass: a forward hook watches the model's loss."""

    def on_train_begin(self, args, state, control, *, model, optimizer, **_):
        super().on_train_begin(args, state, control, model=model, optimizer=optimizer)
        self._hook = model.register_forward_hook(self._watch, with_kwargs=True)

    def _watch(self, module, args, batch, output):
        if module.training:
            self.guard.watch(output["loss"], batch)

    def on_train_end(self, args, state, control, **_):
        self._hook.remove()
        super().on_train_end(args, state, control)


class WatchingTrainer(transformers.Trainer):
    """Watches in `compute_loss`, which evaluation calls too."""

    attached: Attach | None = None

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
        if self.attached is not None and model.training:
            loss = self.attached.guard.watch(loss, inputs)
        return (loss, outputs) if return_outputs else loss


def train(net, rows, out: Path, *, attach=None, loss_scale=None, callback=Attach, **options):
    """Train one epoch; `loss_scale` adds the GradScaler that the trainer uses on GPUs only."""
    arguments = transformers.TrainingArguments(
        output_dir=str(out / "trainer"),
        use_cpu=True,
        per_device_train_batch_size=4,
        num_train_epochs=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        max_grad_norm=1.0,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **{"logging_strategy": "no", "fp16": loss_scale is not None, **options},
    )
    trainer = WatchingTrainer(net, arguments, train_dataset=rows, eval_dataset=rows[:8])
    if loss_scale is not None:
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=loss_scale)
        trainer.accelerator.native_amp = True
    if attach is not None:
        attached = callback(scaler=trainer.accelerator.scaler, **attach)
        trainer.add_callback(attached)
        trainer.attached = attached if callback is Attach else None
    trainer.train()
    return trainer


PRECISIONS = [
    pytest.param({}, id="fp32"),
    pytest.param({"bf16": True}, id="bf16"),
    pytest.param({"loss_scale": 2.0**12}, id="fp16"),
]


@pytest.mark.parametrize(
    ("precision", "accumulate"),
    [
        pytest.param({}, 1, id="fp32"),
        pytest.param({"bf16": True}, 2, id="bf16, accumulated"),
        pytest.param({"loss_scale": 2.0**12}, 1, id="fp16"),
        pytest.param({"loss_scale": 2.0**12}, 2, id="fp16, accumulated"),
    ],
)
def test_only_the_bad_update_is_refused(task, tmp_path, precision, accumulate):
    options = {**precision, "gradient_accumulation_steps": accumulate}
    bare, guarded, skipped = task.net(), task.net(), task.net()
    train(bare, task.rows(bad_batch=True), tmp_path, **options)
    assert not task.finite(bare)

    train(guarded, task.rows(bad_batch=True), tmp_path, attach={"run_dir": tmp_path / "run"}, **options)
    expected = [Verdict.APPLIED] * (12 // accumulate)
    expected[task.bad_update(accumulate)] = Verdict.NONFINITE
    assert task.verdicts(tmp_path / "run") == expected
    train(skipped, task.rows(without=task.batches_of_bad_update(accumulate)), tmp_path, **options)
    assert task.same(guarded, skipped)


@pytest.mark.parametrize("options", [*PRECISIONS, pytest.param({"optim": "adamw_torch"}, id="unfused")])
def test_healthy_run_is_unchanged(task, tmp_path, options):
    bare, guarded = task.net(), task.net()
    train(bare, task.rows(), tmp_path, **options)
    train(guarded, task.rows(), tmp_path, attach={"run_dir": tmp_path / "run"}, **options)
    assert task.same(bare, guarded)
    assert task.verdicts(tmp_path / "run") == [Verdict.APPLIED] * 12


def test_callback_needs_no_trainer_subclass(task, tmp_path):
    guarded, skipped = task.net(), task.net()
    options = {"eval_strategy": "steps", "eval_steps": 4}
    train(
        guarded,
        task.rows(bad_batch=True),
        tmp_path,
        attach={"run_dir": tmp_path / "run"},
        callback=AttachAndWatch,
        **options,
    )
    train(skipped, task.rows(without=task.batches_of_bad_update(1)), tmp_path, **options)
    assert task.same(guarded, skipped)
    assert surefoot.read(tmp_path / "run").scalars["samples"].tolist() == [4.0] * 12


def test_run_with_only_nan_batches_is_stopped(task, tmp_path):
    rows = [row | {"x": row["x"] * float("nan")} for row in task.rows()]
    net = task.net()
    with pytest.raises(surefoot.TrainingStopped, match="2 updates in a row were refused"):
        train(
            net,
            rows,
            tmp_path,
            attach={"run_dir": tmp_path / "run", "policy": surefoot.Policy(max_consecutive_vetoes=2)},
        )
    assert task.same(net, task.net())


def test_recorded_norms_are_from_before_clipping(task, tmp_path):
    trainer = train(
        task.net(),
        task.rows(),
        tmp_path,
        attach={"run_dir": tmp_path / "run"},
        logging_strategy="steps",
        logging_steps=1,
    )
    logged = [line for line in trainer.state.log_history if "grad_norm" in line]
    scalars = surefoot.read(tmp_path / "run").scalars
    assert max(scalars["norm"]) > 1.0
    assert scalars["norm"].tolist() == pytest.approx([line["grad_norm"] for line in logged], rel=1e-5)
    assert scalars["loss"].tolist() == pytest.approx([line["loss"] for line in logged], rel=1e-5)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_loss_scale_overflow_is_no_refusal(task, tmp_path, accumulate, optim):
    options = {"loss_scale": 2.0**20, "optim": optim, "gradient_accumulation_steps": accumulate}
    bare, guarded = task.net(), task.net()
    bare_trainer = train(bare, task.rows(), tmp_path, **options)
    guarded_trainer = train(guarded, task.rows(), tmp_path, attach={"run_dir": tmp_path / "run"}, **options)
    verdicts = task.verdicts(tmp_path / "run")
    assert len(verdicts) == 12 // accumulate
    assert set(verdicts) == {Verdict.OVERFLOW, Verdict.APPLIED}  # near the limit they may alternate
    scales = [2.0 ** (20 - verdicts[:i].count(Verdict.OVERFLOW)) for i in range(12 // accumulate)]
    assert surefoot.read(tmp_path / "run").scalars["loss_scale"].tolist() == scales
    assert bare_trainer.accelerator.scaler.get_scale() == guarded_trainer.accelerator.scaler.get_scale()
    assert task.same(bare, guarded)


def test_loss_of_accumulated_token_means_equals_the_trainers(tmp_path):
    """transformers models divide each micro-batch's loss by the tokens of the whole update, so the losses add up."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 32, (16, 8))]
    trainer = train(
        transformers.LlamaForCausalLM(config),
        rows,
        tmp_path,
        attach={"run_dir": tmp_path / "run"},
        gradient_accumulation_steps=2,
        logging_strategy="steps",
        logging_steps=1,
    )
    logged = [line["loss"] for line in trainer.state.log_history if "grad_norm" in line]
    assert surefoot.read(tmp_path / "run").scalars["loss"].tolist() == pytest.approx(logged, rel=1e-4)
