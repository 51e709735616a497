"""SurefootCallback in Lightning's Trainer: in step with its counters, schedules and checkpoints; and Fabric."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import surefoot
from surefoot.guard.validate import Misuse
from surefoot.records import Verdict

WHY = "lightning is not installed: pip install 'surefoot[lightning]'"
lightning = pytest.importorskip("lightning.pytorch", reason=WHY)
integration = pytest.importorskip("surefoot.integrations.lightning", reason=WHY, exc_type=ImportError)
SurefootCallback = integration.SurefootCallback

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:.*have no `val_dataloader`:UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint:UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory:UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore:.*should be consistent with the number of:UserWarning:lightning"),
]
ROWS, BATCH = 480, 4


class Automatic(lightning.LightningModule):
    """Lightning calls backward, clips and steps; the rate falls to zero over the run."""

    def __init__(self, net, *, fused: bool = False, damage_at: int = -1) -> None:
        super().__init__()
        self.net, self._fused, self._damage_at = net, fused, damage_at
        self.rates: list[float] = []
        self.seen: list[int] = []

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2, fused=self._fused)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_start(self, batch, index) -> None:
        self.seen.append(index)
        if self.trainer.global_step == self._damage_at:
            with torch.no_grad():
                for p in self.net.parameters():
                    p.mul_(30.0)

    def training_step(self, batch, index):
        loss = self.net(**batch)["loss"]
        self.log("train_loss", loss)
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss

    def validation_step(self, batch, index) -> None:
        self.log("val_loss", self.net(**batch)["loss"])


class Manual(Automatic):
    """Two optimizers that alternate: one on the body, one on a head of its own."""

    automatic_optimization = False

    def configure_optimizers(self) -> Any:
        torch.manual_seed(1)
        self.head = torch.nn.Linear(32, 4)
        options = {"lr": 1e-2, "fused": self._fused}
        return torch.optim.AdamW(self.head.parameters(), **options), torch.optim.AdamW(self.net.parameters(), **options)

    def training_step(self, batch, index):
        middle = self.net.body[:3](batch["x"])
        predictions = self.head(middle.detach()), self.net.body[3](middle)
        for optimizer, prediction in zip(self.optimizers(), predictions, strict=True):
            optimizer.zero_grad()
            self.manual_backward(torch.nn.functional.mse_loss(prediction, batch["labels"]))
            optimizer.step()


def fit(module, rows, callbacks=(), *, ckpt_path=None, validate=False, **options):
    trainer = lightning.Trainer(
        accelerator="cpu",
        callbacks=list(callbacks),
        **{
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            **options,
        },
    )
    loaders = [DataLoader(rows, batch_size=BATCH)] + ([DataLoader(rows[:8], batch_size=BATCH)] if validate else [])
    trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    return trainer


def learnable_rows(seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(16, 4, generator=generator) / 4
    inputs = torch.randn(ROWS, 16, generator=generator)
    return [{"x": x, "labels": x @ weight} for x in inputs]


SETTINGS = {
    "automatic": (Automatic, {}),
    "clipped, accumulated": (Automatic, {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2}),
    "bf16": (Automatic, {"precision": "bf16-mixed"}),
    "manual, two optimizers": (Manual, {}),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("bad_batch", [False, True])
def test_run_is_as_if_the_bad_batch_had_not_been_there(task, tmp_path, setting, bad_batch):
    """Without a bad batch, a healthy run is unchanged."""
    kind, options = SETTINGS[setting]
    accumulate = options.get("accumulate_grad_batches", 1)
    bare, guarded = kind(task.net()), kind(task.net())
    for module in (bare, guarded):
        module.configure_optimizers = lambda m=module: (
            type(m).configure_optimizers(m) if kind is Manual else torch.optim.AdamW(m.net.parameters(), lr=1e-2)
        )
    without = task.batches_of_bad_update(accumulate) if bad_batch else ()
    fit(bare, task.rows(without=without), **options)
    trainer = fit(guarded, task.rows(bad_batch=bad_batch), [SurefootCallback(run_dir=tmp_path)], **options)
    assert task.same(bare, guarded)
    scalars = surefoot.read(tmp_path).scalars
    for k in set(scalars["optimizer"].tolist()):
        verdicts = scalars["verdict"][scalars["optimizer"] == k].tolist()
        expected = [task.bad_update(accumulate)] if bad_batch else []
        assert [i for i, verdict in enumerate(verdicts) if verdict != Verdict.APPLIED] == expected
    assert trainer.global_step == len(scalars["verdict"])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_damaged_weights_are_rewound_and_the_schedule_still_ends_at_zero(task, tmp_path, seed):
    losses = {}
    for name, damage_at in (("healthy", -1), ("damaged", 60)):
        torch.manual_seed(seed)
        module = Automatic(type(task.net())(), damage_at=damage_at)
        checkpoints = lightning.callbacks.ModelCheckpoint(
            tmp_path / name / "saved", every_n_train_steps=10, save_top_k=-1, save_last=True
        )
        callbacks = [SurefootCallback(run_dir=tmp_path / name), checkpoints]
        trainer = fit(module, learnable_rows(seed), callbacks, validate=True, enable_checkpointing=True)
        losses[name] = float(trainer.callback_metrics["val_loss"])
        assert trainer.global_step == ROWS // BATCH
        assert module.rates == pytest.approx([1e-2 * (1 - i / 120) for i in range(120)])
    assert losses["damaged"] < 1.3 * losses["healthy"] + 0.05
    assert [e for e in surefoot.read(tmp_path / "damaged").events if e.get("name") == "rewound"]
    assert Path(checkpoints.best_model_path).exists()
    for path in (tmp_path / "damaged" / "saved").iterdir():
        weights = torch.load(path, weights_only=True)["state_dict"]
        largest = max(float(t.abs().max()) for name, t in weights.items() if "running" not in name and t.dim() > 1)
        assert largest < 5 or path.name.endswith("-doubted"), path


def test_resumed_run_goes_on_as_if_it_had_never_ended(task, tmp_path):
    rows = learnable_rows()
    through = Automatic(task.net())
    fit(through, rows, max_epochs=2)

    class End(lightning.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            if trainer.global_step == 150:
                raise RuntimeError("the machine is gone")

    saving = {"save_on_train_epoch_end": True}  # within an epoch, Lightning needs a loader with a state
    first = SurefootCallback(run_dir=tmp_path / "run")
    with pytest.raises(RuntimeError, match="gone"):
        fit(
            Automatic(task.net()),
            rows,
            [first, End(), lightning.callbacks.ModelCheckpoint(tmp_path, "at", **saving)],
            enable_checkpointing=True,
            max_epochs=2,
        )
    resumed, callback = Automatic(task.net()), SurefootCallback(run_dir=tmp_path / "run")
    known: list[int] = []

    class Known(lightning.Callback):
        def on_train_start(self, *_):
            known.append(len(callback.guard.history[0]))

    fit(resumed, rows, [callback, Known()], ckpt_path=tmp_path / "at.ckpt", max_epochs=2)
    assert len(resumed.seen) == ROWS // BATCH
    assert known == [100]  # all that the guard remembers
    assert callback.guard.step == 2 * ROWS // BATCH
    assert task.same(through, resumed)


def test_stop_ends_training_cleanly_and_the_next_fit_works(task, tmp_path):
    rows = [row | {"x": row["x"] * float("nan")} for row in task.rows()]
    callback = SurefootCallback(run_dir=tmp_path / "run", policy=surefoot.Policy(max_consecutive_vetoes=2))
    module = Automatic(task.net())
    trainer = fit(module, rows, [callback])
    assert "2 updates in a row were refused" in callback.stop_reason
    assert trainer.global_step < 12
    assert task.same(module.net, task.net())
    assert "save_checkpoint" not in vars(trainer)

    fit(module, task.rows(), [callback])
    assert callback.stop_reason is None
    assert not task.same(module.net, task.net())


def test_wrong_use_is_one_clear_sentence(task, tmp_path):
    with pytest.raises(Misuse, match="resume as Lightning does"):
        SurefootCallback(run_dir=tmp_path, resume=True)
    with pytest.raises(Misuse, match="leave scaler= out"):
        SurefootCallback(run_dir=tmp_path, scaler=None)
    callbacks = [SurefootCallback(run_dir=tmp_path / name) for name in "ab"]
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `LightningCallback`"):
        fit(Automatic(task.net()), task.rows(), callbacks)


@pytest.mark.parametrize("watched", [False, True])
def test_fabric_clips_and_refuses_the_bad_update(task, tmp_path, watched):
    """`clip_gradients` does not raise on the NaN, because the update is refused anyway."""
    nets = []
    for rows, run_dir in (
        (task.rows(bad_batch=True), tmp_path),
        (task.rows(without=task.batches_of_bad_update(1)), None),
    ):
        fabric = integration.Fabric(accelerator="cpu", devices=1)
        net = task.net()
        model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        guard = None if run_dir is None else integration.attach_fabric(fabric, model, optimizer, run_dir=run_dir)
        for batch in fabric.setup_dataloaders(DataLoader(rows, batch_size=BATCH)):
            loss = model(**batch)["loss"]
            if guard is not None and watched:
                guard.watch(loss, batch)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        if guard is not None:
            guard.close()
            assert "backward" not in vars(fabric)
            assert "clip_gradients" not in vars(fabric)
        nets.append(net)
    assert task.same(*nets)
    verdicts = task.verdicts(tmp_path)
    assert [i for i, verdict in enumerate(verdicts) if verdict != Verdict.APPLIED] == [task.bad_update(1)]
    assert len(verdicts) == 12
