"""Attached inside HF Trainer, whose clipping, accumulation and mixed precision stay its own."""

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
    """Attaches when the trainer has made its optimizer, and lets go when it is done."""

    guard: surefoot.Guard | None = None

    def __init__(self, **options: Any) -> None:
        self._options = options

    def on_train_begin(self, args, state, control, *, model, optimizer, **_):
        self.guard = surefoot.attach(model, optimizer, **self._options)

    def on_train_end(self, args, state, control, **_):
        self.guard.close()


class AttachAndWatch(Attach):
    """Needs no trainer of its own: the loss is watched where the model hands it out."""

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


def train(net, rows, out: Path, *, attach=None, loss_scale=None, way=Attach, **options):
    """One epoch over the rows in order; `loss_scale` gives float16 the scaler that it has on a GPU and lacks here."""
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
        attached = way(scaler=trainer.accelerator.scaler, **attach)
        trainer.add_callback(attached)
        trainer.attached = attached if way is Attach else None
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
def test_only_the_spoilt_update_is_refused(task, tmp_path, precision, accumulate):
    options = {**precision, "gradient_accumulation_steps": accumulate}
    bare, guarded, spared = task.net(), task.net(), task.net()
    train(bare, task.rows(spoilt=True), tmp_path, **options)
    assert not task.finite(bare)

    train(guarded, task.rows(spoilt=True), tmp_path, attach={"run_dir": tmp_path / "run"}, **options)
    want = [Verdict.APPLIED] * (12 // accumulate)
    want[task.update(accumulate)] = Verdict.NONFINITE
    assert task.verdicts(tmp_path / "run") == want
    train(spared, task.rows(without=task.partners(accumulate)), tmp_path, **options)
    assert task.same(guarded, spared)


@pytest.mark.parametrize("options", [*PRECISIONS, pytest.param({"optim": "adamw_torch"}, id="unfused")])
def test_a_healthy_run_is_left_alone(task, tmp_path, options):
    bare, guarded = task.net(), task.net()
    train(bare, task.rows(), tmp_path, **options)
    train(guarded, task.rows(), tmp_path, attach={"run_dir": tmp_path / "run"}, **options)
    assert task.same(bare, guarded)
    assert task.verdicts(tmp_path / "run") == [Verdict.APPLIED] * 12


def test_a_callback_is_enough(task, tmp_path):
    guarded, spared = task.net(), task.net()
    options = {"eval_strategy": "steps", "eval_steps": 4}
    train(
        guarded, task.rows(spoilt=True), tmp_path, attach={"run_dir": tmp_path / "run"}, way=AttachAndWatch, **options
    )
    train(spared, task.rows(without=task.partners(1)), tmp_path, **options)
    assert task.same(guarded, spared)
    assert surefoot.read(tmp_path / "run").scalars["samples"].tolist() == [4.0] * 12


def test_a_hopeless_run_is_stopped(task, tmp_path):
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


def test_norms_are_those_before_its_clipping(task, tmp_path):
    trainer = train(
        task.net(),
        task.rows(),
        tmp_path,
        attach={"run_dir": tmp_path / "run"},
        logging_strategy="steps",
        logging_steps=1,
    )
    logged = [line for line in trainer.state.log_history if "grad_norm" in line]
    seen = surefoot.read(tmp_path / "run").scalars
    assert max(seen["norm"]) > 1.0
    assert seen["norm"].tolist() == pytest.approx([line["grad_norm"] for line in logged], rel=1e-5)
    assert seen["loss"].tolist() == pytest.approx([line["loss"] for line in logged], rel=1e-5)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_overflow_of_the_loss_scale_is_no_refusal(task, tmp_path, accumulate, optim):
    options = {"loss_scale": 2.0**20, "optim": optim, "gradient_accumulation_steps": accumulate}
    bare, guarded = task.net(), task.net()
    one = train(bare, task.rows(), tmp_path, **options)
    other = train(guarded, task.rows(), tmp_path, attach={"run_dir": tmp_path / "run"}, **options)
    verdicts = task.verdicts(tmp_path / "run")
    assert len(verdicts) == 12 // accumulate
    assert set(verdicts) == {Verdict.OVERFLOW, Verdict.APPLIED}  # at a scale near the limit they may take turns
    scales = [2.0 ** (20 - verdicts[:i].count(Verdict.OVERFLOW)) for i in range(12 // accumulate)]
    assert surefoot.read(tmp_path / "run").scalars["loss_scale"].tolist() == scales
    assert one.accelerator.scaler.get_scale() == other.accelerator.scaler.get_scale()
    assert task.same(bare, guarded)


def test_the_loss_of_accumulated_token_means_is_the_trainers(tmp_path):
    """Models of transformers divide each part's loss by the tokens of the whole update, so the parts add up."""
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
