"""Random numbers for healthy controls."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from benchmarks.zoo.training import ZooRun


def step_rng(run: ZooRun, step: int) -> Generator:
    """A generator for one step, independent of the one that made its batch."""
    return torch.Generator().manual_seed(run.settings.seed * 7_368_787 + step)


def step_normal(run: ZooRun, step: int, like: Tensor) -> Tensor:
    return torch.randn(like.shape, generator=step_rng(run, step))
