"""surefoot in Lightning's Trainer: one callback; clipping, accumulation and checkpoints stay with Lightning.

python examples/lightning_module.py [RUN_DIR]
"""

import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import surefoot
from surefoot.integrations.lightning import SurefootCallback

run_dir = sys.argv[1] if len(sys.argv) > 1 else "runs/lightning_module"


class Regressor(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=1e-3)

    def training_step(self, batch, index):
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)


pl.seed_everything(0, verbose=False)
x = torch.randn(3200, 16)
y = x.sum(dim=1, keepdim=True)
x[1300] = float("nan")
model, callback = Regressor(), SurefootCallback(run_dir)
trainer = pl.Trainer(
    accelerator="cpu",
    callbacks=[callback],
    max_epochs=1,
    precision="bf16-mixed",
    gradient_clip_val=1.0,
    accumulate_grad_batches=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(TensorDataset(x, y), batch_size=32))

run = surefoot.read(run_dir)
print(f"{run.scalars.rows} updates attempted, {callback.guard.step} applied")
print(*(f"update {e['step']}: {e['action']}, {e['reason']}" for e in run.events if e["kind"] == "decision"), sep="\n")
print(f"all weights finite: {all(bool(p.isfinite().all()) for p in model.parameters())}")
