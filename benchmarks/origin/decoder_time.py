"""How long it takes to name an operation and a sample in a decoder of a named size."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import surefoot
from benchmarks.origin.planted import REPORT
from surefoot.models.decoder import SIZES, Decoder

PLANTED = ("entropy", "distance_of_equals")
"""One that goes wrong in forward, one in backward."""
BATCH = 8


class PlantedMlp(nn.Module):
    """An MLP with an operation behind it."""

    def __init__(self, inner: nn.Module, function: Any) -> None:
        super().__init__()
        self.inner, self.function = inner, function
        self.mark = torch.zeros(BATCH, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        return self.function(out, self.mark.to(out))


def main(size: str, device: str | None) -> str:
    """Seconds for a planted operation in forward and in backward, in the middle of the decoder."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return "\n".join(_timed(size, device, name) for name in PLANTED)


def _timed(size: str, device: str, name: str) -> str:
    torch.manual_seed(0)
    model = Decoder(SIZES[size])
    block: Any = model.blocks[len(model.blocks) // 2]
    block.mlp = PlantedMlp(block.mlp, next(op.function for op in REPORT if op.function.__name__ == name))
    model.to(device)
    tokens = torch.randint(0, SIZES[size].vocab, (BATCH, 256), device=device)
    mark = torch.zeros(BATCH, 1, 1, device=device)
    mark[5] = 1.0

    def step_fn(model: nn.Module, batch: Any) -> Tensor:
        block.mlp.mark = batch[1]
        with torch.autocast(device, dtype=torch.bfloat16):
            return model(batch[0], batch[0]) / batch[0].numel()

    origin = surefoot.locate(model, (tokens, mark), step_fn)
    where = f"{origin.operation} in {origin.module}, sample {list(origin.samples)}"
    return f"{size} on {device}, {name}: {where}; {origin.forwards} forward passes, {origin.seconds:.1f} s"
