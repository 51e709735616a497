"""Healthy loops: plain ones in the tuning half, suspicious ones in the half that is reported."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.silent_bugs import tasks
from benchmarks.silent_bugs.loops import CASES, Half, Loop, twin
from benchmarks.silent_bugs.small_models import Siamese, TokenDecoder, TorchDecoder, VariationalAutoEncoder, with_lora
from benchmarks.zoo.models import convolutional, mlp, residual

PLAIN = {
    "decoder": tasks.decoder_loop,
    "conv": tasks.image_loop,
    "regression": tasks.regression_loop,
    "vision-language": tasks.caption_loop,
    "autoencoder": tasks.autoencoder_loop,
    "recurrent": tasks.recurrent_loop,
    "contrastive": tasks.contrastive_loop,
    "masked LM": tasks.masked_loop,
    "text": tasks.text_loop,
    "multi-output": tasks.two_head_loop,
    "segmentation": tasks.segmentation_loop,
}


def _plain(family: str) -> None:
    def build() -> Loop:
        """A healthy loop."""
        return PLAIN[family]()

    build.__name__ = f"healthy_{family.replace('-', '_').replace(' ', '_')}"
    twin(Half.TUNING, family)(build)


for name in PLAIN:
    _plain(name)


@twin(Half.TUNING, "lora")
def healthy_lora() -> Loop:
    """Adapters beside frozen layers."""
    model = with_lora(TokenDecoder())
    held = [p for p in model.parameters() if p.requires_grad]
    return tasks.decoder_loop(model, optimizer=torch.optim.AdamW(held, lr=2e-3))


@twin(Half.TUNING, "decoder")
def healthy_padded_text() -> Loop:
    """Padding that the loss ignores."""
    loop = tasks.decoder_loop()
    loop.batches = tasks.several(lambda: tasks.padded(tasks.sequences())[0])
    loop.step_fn = lambda m, b: tasks.next_token(m(b), b, ignore_index=tasks.PAD)
    return loop


@twin(Half.TUNING, "contrastive")
def healthy_siamese() -> Loop:
    """SimSiam with AdamW."""
    loop = simsiam()
    loop.optimizer = tasks.adamw(loop.model)
    return loop


# -- suspicious, and healthy


@twin(Half.REPORT, "decoder")
def bias_only() -> Loop:
    """Only biases are trained."""
    model = TokenDecoder()
    for p in model.parameters():
        p.requires_grad_(p.dim() == 1)
    held = [p for p in model.parameters() if p.requires_grad]
    return tasks.decoder_loop(model, optimizer=torch.optim.AdamW(held, lr=5e-3))


@twin(Half.REPORT, "conv")
def linear_probe() -> Loop:
    """A frozen body, and the optimizer is given every parameter."""
    model = convolutional()
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("9"))
    return tasks.image_loop(model)


@twin(Half.REPORT, "regression")
def weight_clipping() -> Loop:
    """Weights are kept within bounds, as a critic's are."""
    loop = tasks.regression_loop()

    def step_fn(model: nn.Module, batch: Any) -> Tensor:
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.5, 0.5)
        return F.mse_loss(model(batch[0]).squeeze(-1), batch[1])

    loop.step_fn = step_fn
    return loop


@twin(Half.REPORT, "tabular")
def raw_units_normalised_inside() -> Loop:
    """Raw features, and batch norm as the first layer."""
    loop = tasks.regression_loop(nn.Sequential(nn.BatchNorm1d(12), mlp([12, 32, 32, 1], nn.ReLU)))
    units = torch.tensor([1.0, 200.0, 3e3, 0.01] * 3)
    loop.batches = [(x * units, y) for x, y in loop.batches]
    return loop


@twin(Half.REPORT, "contrastive")
def simsiam() -> Loop:
    """SimSiam with its stop-gradient."""
    model = Siamese()

    def step_fn(model: nn.Module, views: Any) -> Tensor:
        pa, pb, za, zb = model(*views)
        return -(F.cosine_similarity(pa, zb).mean() + F.cosine_similarity(pb, za).mean()) / 2

    return tasks.make(model, tasks.several(tasks.two_views), step_fn, tasks.sgd(model, 0.05))


@twin(Half.REPORT, "residual")
def zero_last_layer() -> Loop:
    """The output layer starts at zero."""
    model = residual()
    last = model.get_submodule("7")
    for p in last.parameters():
        nn.init.zeros_(p)
    loop = tasks.image_loop(model)
    loop.batches = [(x.repeat(1, 3, 2, 2)[..., :12, :12], y) for x, y in loop.batches]
    return loop


@twin(Half.REPORT, "decoder")
def warmup() -> Loop:
    """A schedule with a warmup, right at its start."""
    model = TorchDecoder()
    loop = tasks.decoder_loop(model)
    loop.batches = tasks.several(lambda: tasks.sequences(16, 14, 24))
    loop.scheduler = torch.optim.lr_scheduler.LambdaLR(
        loop.optimizer, lambda step: min(step / 100, max(0.0, (1000 - step) / 900))
    )
    loop.total_steps = 1000
    return loop


@twin(Half.REPORT, "decoder")
def tied_embedding() -> Loop:
    """Embedding and output layer share their weight."""
    model = TokenDecoder()
    model.core.head.weight = model.core.embed.weight
    nn.init.normal_(model.core.embed.weight, std=0.05)
    return tasks.decoder_loop(model)


@twin(Half.REPORT, "autoencoder")
def variational() -> Loop:
    """A variational autoencoder, given images with labels that it does not need."""
    loop = tasks.autoencoder_loop(VariationalAutoEncoder())

    def step_fn(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0]
        out, mean, log_var = model(x)
        return F.mse_loss(out, x) - 0.02 * (1 + log_var - mean.square() - log_var.exp()).mean()

    loop.batches = [(x, torch.randint(0, 5, (len(x),))) for x in loop.batches]
    loop.step_fn = step_fn
    return loop


@twin(Half.REPORT, "conv")
def summed_loss_with_adam() -> Loop:
    """A loss summed over the batch, which Adam does not mind."""
    loop = tasks.image_loop()
    loop.step_fn = lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="sum")
    return loop


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(1, 24), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x)[0])


@twin(Half.REPORT, "recurrent")
def time_first() -> Loop:
    """Batches of shape (time, batch, features)."""
    loop = tasks.recurrent_loop(TimeFirst())
    loop.batches = [x.transpose(0, 1).contiguous() for x in loop.batches]
    loop.step_fn = lambda m, x: F.mse_loss(m(x[:-1]), x[1:])
    return loop


@twin(Half.REPORT, "decoder")
def autocast() -> Loop:
    """Weights of float32, computed with in bfloat16."""
    loop = tasks.decoder_loop()

    def step_fn(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return tasks.next_token(model(batch).float(), batch)

    loop.step_fn = step_fn
    return loop


@twin(Half.REPORT, "conv")
def strong_augmentation() -> Loop:
    """Dropout of a half, label smoothing and few samples of a class."""
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    )
    loop = tasks.image_loop(model)
    loop.step_fn = lambda m, b: F.cross_entropy(m(b[0]), b[1], label_smoothing=0.1)
    return loop


@twin(Half.REPORT, "detector")
def rare_class() -> Loop:
    """One of thirty samples is positive."""
    loop = tasks.regression_loop()
    loop.batches = [(x, (x[:, 0] > 1.8).float()) for x, _ in loop.batches]
    loop.step_fn = lambda m, b: F.binary_cross_entropy_with_logits(m(b[0]).squeeze(-1), b[1])
    return loop


assert all(case.about for case in CASES.values())
