"""Facts about samples: none influences another, the outputs depend on the inputs, and they do not collapse."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from surefoot.checkpoint.tree import tensors_in
from surefoot.kinds import Cause
from surefoot.preflight_checks.findings import PreflightFinding, doubtful, place_of, sure
from surefoot.preflight_checks.loop_probe import CannotTell, PreflightContext
from surefoot.preflight_checks.target_facts import relative_change

LEAKS = 1e-3
"""Relative change of one sample's outputs with another sample: more than rounding."""
_BATCH_SECOND = (nn.MultiheadAttention, nn.RNNBase)


def leak_across_samples(c: PreflightContext) -> Iterator[PreflightFinding]:
    """Change one sample: the outputs of the others stay."""
    base, n = c.base, c.probe_size
    if n < 3 or any(_uses_batch_stats(m) for name, m in c.model.named_modules() if base.modes.get(name)):
        return
    if any(t.shape[:2] == (n, n) for t in c.base.inputs):
        return  # a graph: samples are nodes
    worst = _influence(c, n, 0)
    if worst <= LEAKS:
        return
    second = [name for name, m in c.model.named_modules() if isinstance(m, _BATCH_SECOND) and not m.batch_first]
    labelled = any(call.target.numel() == n for call in base.loss_calls)
    how = f"with sample 0 changed, outputs of other samples change by {worst:.2g} of their size"
    if labelled and len(c.batches) > 1 and not _same_inputs(c):
        yield sure(
            Cause.LEAK,
            "samples of a batch influence each other",
            how + ", with batch norm in evaluation mode",
            "Look for batch_first, softmax or normalisation over dimension 0, and view or reshape across the batch.",
            where=place_of(c.model, second[0]) if second else "",
            change=worst,
        )
        return
    if second:
        how += f"; {second[0]} was created with batch_first=False, and expects (length, batch, features)"
    yield doubtful(
        Cause.LEAK,
        f"samples influence each other, if the first dimension ({n}) is the batch",
        how,
        "Create it with batch_first=True, or look for view, reshape and normalisation across the batch.",
        where=place_of(c.model, second[0]) if second else "",
        change=worst,
    )


def _influence(c: PreflightContext, n: int, dim: int) -> float:
    """How much the outputs of other places along this dimension change with the first of them."""

    def change(tensors: list[Tensor]) -> list[Tensor]:
        changed: list[Tensor] = []
        for t in tensors:
            if t.dim() > dim and t.shape[dim] == n:
                t = t.clone()
                t.select(dim, 0).copy_(t.select(dim, 1))
            changed.append(t)
        return changed

    worst = 0.0
    for a, b in zip(c.base.outputs, c.repeat(change).outputs, strict=True):
        if a.dim() <= dim or a.shape != b.shape or a.shape[dim] % n or a.shape == (n, n):
            continue  # a square: similarities between samples
        rows = a.float().movedim(dim, 0).reshape(n, -1), b.float().movedim(dim, 0).reshape(n, -1)
        worst = max(worst, relative_change(rows[0][1:], rows[1][1:]))
    return worst


def _same_inputs(c: PreflightContext) -> bool:
    """Training on the whole data at once: its samples may be meant to know of each other."""
    a, b = (list(tensors_in(batch)) for batch in c.batches[:2])
    return len(a) == len(b) and all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def _uses_batch_stats(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def independent_of_inputs(c: PreflightContext) -> Iterator[PreflightFinding]:
    """Inputs of zero, and those of other samples, give the same outputs."""
    base = c.base
    n = c.probe_size
    if n < 2 or not any(len(out) % n == 0 for out in base.outputs):
        raise CannotTell("the outputs are not one per sample")
    if all(bool((out == 0).all()) for out in base.outputs):
        return  # a last layer of zeros, before the first update

    def zeroed(tensors: list[Tensor]) -> list[Tensor]:
        return [torch.zeros_like(t) if t.is_floating_point() else t.roll(1, 0) if t.dim() else t for t in tensors]

    def exchanged(tensors: list[Tensor]) -> list[Tensor]:
        return [t.roll(1, 0) if t.dim() else t for t in tensors]

    outputs = [c.repeat(change).outputs for change in (zeroed, exchanged)]
    inputs = [t for t in base.inputs if t.dim() and t.shape[0] == n]
    if not inputs or all(bool((t == t[:1]).all()) for t in inputs):
        return
    for changed in outputs:
        if any(relative_change(a.float(), b.float()) > 1e-6 for a, b in zip(base.outputs, changed, strict=True)):
            return
    yield sure(
        Cause.DEAD_UNITS,
        "the outputs do not depend on the inputs",
        "they are the same for inputs of zero and for those of other samples",
        "Look for a layer of zeros, dead or saturated units, and inputs that forward does not use.",
    )


FACTS = (leak_across_samples, independent_of_inputs)
