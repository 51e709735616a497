"""Numbers of a batch, measured without a wait: samples, mean, standard deviation, largest magnitude, progress."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from surefoot.records import NAN

MAX_VALUES = 1 << 16
"""Values of a batch that are measured at most: enough for mean and standard deviation to within a percent."""


def count_samples(batch: Any) -> float:
    """Number of samples in a batch of any structure: the first dimension of the first tensor found."""
    if isinstance(batch, Tensor):
        return float(batch.shape[0]) if batch.dim() else NAN
    items = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    for item in items:
        samples = count_samples(item)
        if not math.isnan(samples):
            return samples
    return NAN


def find_float_tensor(batch: Any, device: torch.device) -> Tensor | None:
    """The first floating-point tensor in a batch of any structure, if it is on the model's device."""
    if isinstance(batch, Tensor):
        usable = batch.is_floating_point() and batch.device == device and batch.numel() > 1
        return batch.detach() if usable else None
    items = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return next((tensor for item in items if (tensor := find_float_tensor(item, device)) is not None), None)


def measure_batch(values: Tensor, out: Tensor) -> None:
    """Write mean, standard deviation and largest magnitude to `out`, a vector of three."""
    with torch.no_grad():
        flat = values.reshape(-1)
        if flat.numel() > MAX_VALUES:
            flat = flat[:: flat.numel() // MAX_VALUES | 1]  # an odd stride, so that it does not stay on one channel
        std, mean = torch.std_mean(flat)
        out.copy_(torch.stack([mean, std, torch.linalg.vector_norm(flat, torch.inf)]))


def add_to_mean(value: Tensor | float, mean: Tensor, earlier: int) -> None:
    """Make `mean`, the mean of so many earlier values, that of this one too."""
    with torch.no_grad():
        new = value.detach().reshape(()).to(mean, non_blocking=True) if isinstance(value, Tensor) else value
        mean.copy_(mean + (new - mean) / (earlier + 1)) if earlier else mean.fill_(new)
