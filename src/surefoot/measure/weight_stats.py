"""How far an update moved the weights, told from a sample of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surefoot.measure.layout import local

STRIDE = 509
"""One weight in so many is sampled: far under one percent of the memory, and prime so that no row pattern is met."""
LEAST = 1024
"""Weights that are sampled of each tensor, if it has so many: fewer would tell of a small model by chance."""


class UpdateSample:
    """Holds a sample of the weights from just before a step, to compare with just after it."""

    def __init__(self, params: Sequence[Tensor], once: Tensor, device: torch.device) -> None:
        counted = [bool(c) for c in once.tolist()]  # made once, at attach
        self._params = [p for p, c in zip(params, counted, strict=True) if c and p.requires_grad]
        self._device = device
        self._strides = [_stride(p) for p in self._params]
        self._shares = torch.tensor(self._strides, dtype=torch.float32, device=device)
        """How many weights each that is sampled stands for."""
        self._before: list[Tensor] | None = None

    def take(self) -> None:
        """Remember the weights as they are now."""
        self._before = [t.clone() for t in self._sampled()]

    def unmoved(self) -> Tensor | None:
        """Share of the weights that are exactly what they were when they were taken, a step ago; NaN where no weight
        counts on this process."""
        if self._before is None:
            return None
        if not self._before:
            return self._shares.new_full((), torch.nan)
        pairs = zip(self._sampled(), self._before, strict=True)
        same = [(now == before).sum().to(self._device, non_blocking=True) for now, before in pairs]
        count = sum(stride * b.numel() for stride, b in zip(self._strides, self._before, strict=True))
        return (torch.stack(same) * self._shares).sum() / count

    def forget(self) -> None:
        """The weights are others now."""
        self._before = None

    def compare(self) -> tuple[Tensor, Tensor] | None:
        """Sums of squares of the change since then and of the weights, by the sample; None when none was taken.

        Zeros where no weight counts on this process: it looks at its weights when the others do.
        """
        if self._before is None:
            return None
        if not self._before:
            return self._shares.sum(), self._shares.sum()
        now = self._sampled()
        change = [a - b for a, b in zip(now, self._before, strict=True)]
        return self._squares(change), self._squares(now)

    def _squares(self, tensors: list[Tensor]) -> Tensor:
        norms = [torch.linalg.vector_norm(t.float()).to(self._device, non_blocking=True) for t in tensors]
        return (torch.stack(norms).square() * self._shares).sum()

    def _sampled(self) -> list[Tensor]:
        return [_sample(p, stride) for p, stride in zip(self._params, self._strides, strict=True)]


def _stride(param: Tensor) -> int:
    """Never even: a row of a matrix is most often."""
    return min(STRIDE, local(param.detach()).numel() // LEAST | 1)


def _sample(param: Tensor, stride: int) -> Tensor:
    flat = local(param.detach()).reshape(-1)[::stride]
    return torch.view_as_real(flat) if flat.is_complex() else flat
