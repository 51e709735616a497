"""What comes into a model: the few numbers that tell one batch from another, without a wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

MOST = 1 << 16
"""Values of a batch that are looked at, at most: enough to tell its mean and spread to a percent."""


def numbers_in(batch: Any, device: torch.device) -> Tensor | None:
    """The first tensor of real numbers in whatever a loader hands out, if it lives where the model does."""
    if isinstance(batch, Tensor):
        fit = batch.is_floating_point() and batch.device == device and batch.numel() > 1
        return batch.detach() if fit else None
    inside = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((found for part in inside if (found := numbers_in(part, device)) is not None), None)


def measure_inputs(values: Tensor, out: Tensor) -> None:
    """Mean, spread and largest magnitude into the three places of `out`."""
    with torch.no_grad():
        flat = values.reshape(-1)
        if flat.numel() > MOST:
            flat = flat[:: flat.numel() // MOST | 1]  # odd, so that it does not keep to one channel or column
        spread, mean = torch.std_mean(flat)
        out.copy_(torch.stack([mean, spread, torch.linalg.vector_norm(flat, torch.inf)]))
