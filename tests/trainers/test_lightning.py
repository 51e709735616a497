"""attach inside a LightningModule, whose backward runs in the optimizer's closure unless optimization is manual."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

import surefoot
from surefoot.records import Verdict

lightning = pytest.importorskip(
    "lightning.pytorch", reason="lightning is not installed: pip install 'surefoot[lightning]'"
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning:lightning"),
]


class Automatic(lightning.LightningModule):
    """Lightning calls backward, clips and steps."""

    def __init__(self, net, *, fused: bool = False, scaler=None, **attach) -> None:
        super().__init__()
        self.net = net
        self.guard: surefoot.Guard | None = None
        self._fused, self._scaler, self._attach = fused, scaler, attach

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2, fused=self._fused)

    def on_train_start(self) -> None:
        if self._attach:
            self.guard = surefoot.attach(self, self.optimizers(), scaler=self._scaler, **self._attach)

    def watched_loss(self, batch):
        loss = self.net(**batch)["loss"]
        return loss if self.guard is None else self.guard.watch(loss, batch)

    def training_step(self, batch, index):
        return self.watched_loss(batch)

    def on_train_end(self) -> None:
        if self.guard is not None:
            self.guard.close()


class Manual(Automatic):
    """The module calls backward, clips and steps, here on every second batch."""

    automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        if index % 2 == 0:
            optimizer.zero_grad()
        self.manual_backward(self.watched_loss(batch) / 2)
        if index % 2 == 1:
            if self._scaler is None:  # with a scaler, the gradients are still scaled here
                torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
            optimizer.step()


class TwoHeads(Automatic):
    """One forward pass for two optimizers: the second backward runs after the first optimizer has stepped."""

    automatic_optimization = False

    def configure_optimizers(self):
        options = {"lr": 1e-2, "fused": self._fused}
        self.head = torch.nn.Linear(32, 4)
        return torch.optim.AdamW(self.head.parameters(), **options), torch.optim.AdamW(self.net.parameters(), **options)

    def training_step(self, batch, index):
        middle = self.net.body[:3](batch["x"])
        predictions = self.head(middle.detach()), self.net.body[3](middle)
        losses = [torch.nn.functional.mse_loss(prediction, batch["labels"]) for prediction in predictions]
        for optimizer, loss in zip(self.optimizers(), losses, strict=True):
            optimizer.zero_grad()
            self.manual_backward(loss if self.guard is None else self.guard.watch(loss, batch))
            optimizer.step()


def train(kind, net, rows, *, attach=None, precision="32-true", loss_scale=None, fused=False, **options):
    """Train one epoch; `loss_scale` adds the GradScaler that Lightning uses on GPUs only."""
    scaler = None if loss_scale is None else torch.amp.GradScaler("cpu", init_scale=loss_scale)
    if scaler is not None:
        options["plugins"] = [lightning.plugins.MixedPrecision("16-mixed", device="cpu", scaler=scaler)]
    else:
        options["precision"] = precision
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(kind(net, fused=fused, scaler=scaler, **attach or {}), DataLoader(rows, batch_size=4))
    return scaler


PRECISIONS = [
    pytest.param({}, id="32-true"),
    pytest.param({"precision": "bf16-mixed"}, id="bf16-mixed"),
    pytest.param({"loss_scale": 2.0**12}, id="16-mixed"),
]
KINDS = [
    pytest.param(Automatic, 1, {"gradient_clip_val": 1.0}, id="automatic"),
    pytest.param(Automatic, 2, {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2}, id="automatic, accumulated"),
    pytest.param(Manual, 2, {}, id="manual"),
]


@pytest.mark.parametrize(("kind", "accumulate", "options"), KINDS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_only_the_bad_update_is_refused(task, tmp_path, precision, kind, accumulate, options):
    options = precision | options
    bare, guarded, skipped = task.net(), task.net(), task.net()
    train(kind, bare, task.rows(bad_batch=True), **options)
    assert not task.finite(bare)

    train(kind, guarded, task.rows(bad_batch=True), attach={"run_dir": tmp_path}, **options)
    expected = [Verdict.APPLIED] * (12 // accumulate)
    expected[task.bad_update(accumulate)] = Verdict.NONFINITE
    assert task.verdicts(tmp_path) == expected
    train(kind, skipped, task.rows(without=task.batches_of_bad_update(accumulate)), **options)
    assert task.same(guarded, skipped)


@pytest.mark.parametrize("kind", [Automatic, Manual, TwoHeads])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_healthy_run_is_unchanged(task, tmp_path, precision, kind):
    bare, guarded = task.net(), task.net()
    train(kind, bare, task.rows(), fused=True, **precision)
    train(kind, guarded, task.rows(), fused=True, attach={"run_dir": tmp_path}, **precision)
    assert task.same(bare, guarded)
    assert set(task.verdicts(tmp_path)) == {Verdict.APPLIED}


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [Automatic, Manual])
def test_loss_scale_overflow_is_no_refusal(task, tmp_path, kind, fused):
    bare, guarded = task.net(), task.net()
    bare_scaler = train(kind, bare, task.rows(), fused=fused, loss_scale=2.0**20)
    guarded_scaler = train(kind, guarded, task.rows(), fused=fused, loss_scale=2.0**20, attach={"run_dir": tmp_path})
    verdicts = task.verdicts(tmp_path)
    assert len(verdicts) == (12 if kind is Automatic else 6)
    assert set(verdicts) == {Verdict.OVERFLOW, Verdict.APPLIED}
    assert bare_scaler.get_scale() == guarded_scaler.get_scale()
    assert task.same(bare, guarded)


@pytest.mark.parametrize("fused", [False, True])
def test_both_optimizers_refuse_the_bad_batch(task, tmp_path, fused):
    guarded, skipped = task.net(), task.net()
    train(TwoHeads, guarded, task.rows(bad_batch=True), attach={"run_dir": tmp_path}, fused=fused)
    train(TwoHeads, skipped, task.rows(without=task.batches_of_bad_update(1)), fused=fused)
    scalars = surefoot.read(tmp_path).scalars
    for optimizer_index in (0, 1):
        verdicts = scalars["verdict"][scalars["optimizer"] == optimizer_index].tolist()
        assert [i for i, verdict in enumerate(verdicts) if verdict != Verdict.APPLIED] == [task.bad_update(1)]
    assert task.same(guarded, skipped)


def test_run_with_only_nan_batches_is_stopped(task, tmp_path):
    rows = [row | {"x": row["x"] * float("nan")} for row in task.rows()]
    net = task.net()
    with pytest.raises(surefoot.TrainingStopped, match="2 updates in a row were refused"):
        train(Automatic, net, rows, attach={"run_dir": tmp_path, "policy": surefoot.Policy(max_consecutive_vetoes=2)})
    assert task.same(net, task.net())


def test_recorded_norms_are_from_before_clipping(task, tmp_path):
    train(Automatic, task.net(), task.rows(), attach={"run_dir": tmp_path / "clipped"}, gradient_clip_val=1e-3)
    train(Automatic, task.net(), task.rows(), attach={"run_dir": tmp_path / "free"})
    clipped, free = (surefoot.read(tmp_path / name).scalars["norm"] for name in ("clipped", "free"))
    assert clipped[0] == free[0] > 1.0


def test_lightnings_optimizer_wrapper_is_unwrapped(task, tmp_path):
    """Updates of a fused optimizer inside Lightning's wrapper are still refused on the device."""
    train(Automatic, task.net(), task.rows(), attach={"run_dir": tmp_path}, fused=True)
    (optimizer,) = surefoot.read(tmp_path).info["config"]["optimizers"]
    assert (optimizer["class"], optimizer["way"]) == ("AdamW", "device")
