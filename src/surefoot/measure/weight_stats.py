"""How far an update moved the weights, estimated from a sample of them; per group where optimizers alternate."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surefoot.measure.grad_stats import GradStats
from surefoot.measure.layout import ParamLayout, to_local

SAMPLE_STRIDE = 509
"""One weight in this many is sampled: far under one percent of the memory, and prime to avoid row patterns."""
MIN_SAMPLES = 1024
"""Weights sampled of each tensor that has so many: with fewer, a small model's numbers would depend on chance."""

OptimizerSet = frozenset[int]
"""Optimizers that step on the same backward."""


class UpdateSample:
    """Holds a sample of the weights from before a step, to compare with the weights after it."""

    def __init__(self, params: Sequence[Tensor], owned: Tensor, device: torch.device) -> None:
        counted = [bool(c) for c in owned.tolist()]  # a wait, but only at attach
        self._params = [p for p, c in zip(params, counted, strict=True) if c and p.requires_grad]
        self._device = device
        self._strides = [_stride(p) for p in self._params]
        self._sample_weights = torch.tensor(self._strides, dtype=torch.float32, device=device)
        """How many weights each sampled one of a tensor stands for."""
        self._before: list[Tensor] | None = None

    def take(self) -> None:
        """Sample the weights as they are now."""
        self._before = [t.clone() for t in self._sampled()]

    def unchanged_fraction(self) -> Tensor | None:
        """Fraction of the weights that still equal the sample, a step later; NaN when this rank owns no weights."""
        if self._before is None:
            return None
        if not self._before:
            return self._sample_weights.new_full((), torch.nan)
        pairs = zip(self._sampled(), self._before, strict=True)
        same = [(now == before).sum().to(self._device, non_blocking=True) for now, before in pairs]
        count = sum(stride * b.numel() for stride, b in zip(self._strides, self._before, strict=True))
        return (torch.stack(same) * self._sample_weights).sum() / count

    def reset(self) -> None:
        """Drop the sample, because the weights were replaced."""
        self._before = None

    def compare(self) -> tuple[Tensor, Tensor] | None:
        """Sums of squares of the change since the sample and of the weights; None without a sample.

        Zeros when this rank owns no weights: all ranks measure their weights at the same steps.
        """
        if self._before is None:
            return None
        if not self._before:
            return self._sample_weights.sum(), self._sample_weights.sum()
        now = self._sampled()
        change = [a - b for a, b in zip(now, self._before, strict=True)]
        return self._squares(change), self._squares(now)

    def _squares(self, tensors: list[Tensor]) -> Tensor:
        norms = [torch.linalg.vector_norm(t.float()).to(self._device, non_blocking=True) for t in tensors]
        return (torch.stack(norms).square() * self._sample_weights).sum()

    def _sampled(self) -> list[Tensor]:
        return [_sample(p, stride) for p, stride in zip(self._params, self._strides, strict=True)]


def _stride(param: Tensor) -> int:
    """An odd stride: the rows of a matrix mostly have an even length."""
    return min(SAMPLE_STRIDE, to_local(param.detach()).numel() // MIN_SAMPLES | 1)


def _sample(param: Tensor, stride: int) -> Tensor:
    flat = to_local(param.detach()).reshape(-1)[::stride]
    return torch.view_as_real(flat) if flat.is_complex() else flat


class AlternatingWeights:
    """Tracks which optimizers step together, and when to measure the weights of each such set: at its own steps.

    The block has room for one set's numbers at a time; they stay there until the next row of that set is sent.
    """

    def __init__(self, layout: ParamLayout, owned: Tensor, device: torch.device, *, every: int) -> None:
        together = frozenset(range(len(layout.group_spans)))
        self.partners: list[OptimizerSet] = [together for _ in layout.group_spans]
        """For each optimizer, those that stepped on the backward that it last used: they share a verdict."""
        self._layout = layout
        self._owned = owned
        self._device = device
        self._every = every
        self._samples: dict[OptimizerSet, tuple[UpdateSample, Tensor]] = {}
        self._steps: dict[OptimizerSet, int] = {}
        """Steps of each set so far."""
        self._due: dict[OptimizerSet, int] = {}
        self._sampled: OptimizerSet | None = None
        """The set whose weights were sampled before the current step."""
        self._in_block: OptimizerSet | None = None
        """The set whose numbers are in the block."""
        self._waiting: set[OptimizerSet] = set()

    def group_stepped(self, stepped: OptimizerSet) -> None:
        """Record that exactly these optimizers have stepped on one backward."""
        self.partners = [stepped if k in stepped else known - stepped for k, known in enumerate(self.partners)]

    def alternates(self, k: int) -> bool:
        """Whether this optimizer steps on another backward than some of the others."""
        return len(self.partners[k]) < len(self.partners)

    def before_step(self, k: int, *, check_now: bool) -> Tensor | None:
        """Sample the weights if due; returns the unchanged fraction of this set's last step, where known."""
        group = self.partners[k]
        sample, _ = self._sample_of(group)
        unchanged = sample.unchanged_fraction() if self._in_block == group else None
        step, due = self._steps.get(group, 0), self._due.get(group, 0)
        if step >= due or (check_now and step > due - self._every + 4):
            if self._in_block not in (None, group):
                self._waiting.add(group)
            elif not self._waiting - {group}:
                self._waiting.discard(group)
                self._sampled, self._due[group] = group, step + self._every
                sample.take()
        self._steps[group] = step + 1
        return unchanged

    def after_step(self, k: int, grad_stats: GradStats, buffers: Sequence[Tensor]) -> bool:
        """Measure how far the step moved the weights, if they were sampled; returns whether they were."""
        group = self.partners[k]
        if self._sampled != group:
            return False
        self._sampled = None
        sample, own = self._sample_of(group)
        change = sample.compare()
        if change is not None:
            grad_stats.measure_weights(*change, buffers, own=own)
            self._in_block = group
        return change is not None

    def block_holds(self, k: int) -> bool:
        """Whether the numbers in the block are those of this optimizer's weights."""
        return self._in_block == self.partners[k]

    def row_sent(self, k: int) -> None:
        """Record that a row of this optimizer was sent: its numbers may be overwritten."""
        if self.block_holds(k):
            self._in_block = None

    def reset(self) -> None:
        """Drop all samples, because the weights were replaced."""
        self._sampled = self._in_block = None
        self._waiting.clear()
        for sample, _ in self._samples.values():
            sample.reset()

    def _sample_of(self, group: OptimizerSet) -> tuple[UpdateSample, Tensor]:
        if group not in self._samples:
            own = torch.zeros(len(self._layout.params), dtype=torch.bool)
            for k in group:
                own[self._layout.optimizer_spans[k]] = True
            own = own.to(self._device, non_blocking=True)
            self._samples[group] = UpdateSample(self._layout.params, self._owned * own, self._device), own
        return self._samples[group]
