"""How far an update moved the weights, told from a sample of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surefoot.measure.layout import local

STRIDE = 509
"""One weight in so many is sampled: far under one percent of the memory, and prime so that no row pattern is met."""


class UpdateSample:
    """Holds a sample of the weights from just before a step, to compare with just after it."""

    def __init__(self, params: Sequence[Tensor], once: Tensor, device: torch.device) -> None:
        counted = [bool(c) for c in once.tolist()]  # made once, at attach
        self._params = [p for p, c in zip(params, counted, strict=True) if c and p.requires_grad]
        self._device = device
        self._before: list[Tensor] | None = None

    def take(self) -> None:
        """Remember the weights as they are now."""
        self._before = [_sample(p).clone() for p in self._params]

    def unmoved(self) -> Tensor | None:
        """Share of the weights that are exactly what they were when they were taken, a step ago."""
        if not self._before:
            return None
        pairs = zip(self._params, self._before, strict=True)
        same = [(_sample(p) == b).sum().to(self._device, non_blocking=True) for p, b in pairs]
        return torch.stack(same).sum() / sum(b.numel() for b in self._before)

    def forget(self) -> None:
        """The weights are others now."""
        self._before = None

    def compare(self) -> tuple[Tensor, Tensor] | None:
        """Sum of squares of the change since then and of the sampled weights, or None when none were taken."""
        if not self._before:
            return None
        now = [_sample(p) for p in self._params]
        change = [a - b for a, b in zip(now, self._before, strict=True)]
        return self._squares(change), self._squares(now)

    def _squares(self, tensors: list[Tensor]) -> Tensor:
        norms = [torch.linalg.vector_norm(t.float()).to(self._device, non_blocking=True) for t in tensors]
        return torch.stack(norms).square().sum()


def _sample(param: Tensor) -> Tensor:
    flat = local(param.detach()).reshape(-1)
    return torch.view_as_real(flat[::STRIDE]) if flat.is_complex() else flat[::STRIDE]
