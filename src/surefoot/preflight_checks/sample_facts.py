"""Facts about samples: none influences another, the outputs depend on the inputs, and they do not collapse."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from surefoot.causes import Cause
from surefoot.preflight_checks.context import CannotTell, PreflightContext
from surefoot.preflight_checks.findings import PreflightFinding, doubtful, place_of, sure
from surefoot.preflight_checks.target_facts import relative_change

LEAKS = 1e-3
"""Relative change of one sample's outputs with another sample: more than rounding."""
_BATCH_SECOND = (nn.MultiheadAttention, nn.RNNBase)


def leak_across_samples(c: PreflightContext) -> Iterator[PreflightFinding]:
    """Change one sample: the outputs of the others stay."""
    n = c.batch_size
    if n < 3 or any(
        m.training for name, m in c.model.named_modules() if _uses_batch_stats(m) and c.base.modes.get(name)
    ):
        return
    base = c.base

    def change(tensors: list[Tensor]) -> list[Tensor]:
        changed = []
        for t in tensors:
            if t.dim() and t.shape[0] == n:
                t = t.clone()
                t[0] = t[1]
            changed.append(t)
        return changed

    other = c.repeat(change)
    worst = 0.0
    for a, b in zip(base.outputs, other.outputs, strict=True):
        if a.dim() == 0 or a.shape != b.shape or a.shape[0] % n:
            continue
        rows_a, rows_b = a.float().reshape(n, -1), b.float().reshape(n, -1)
        worst = max(worst, relative_change(rows_a[1:], rows_b[1:]))
    if worst <= LEAKS:
        return
    second = [name for name, m in c.model.named_modules() if isinstance(m, _BATCH_SECOND) and not m.batch_first]
    if second and not _labelled_per_sample(c, n):
        yield doubtful(
            Cause.LEAK,
            f"samples influence each other, if the first dimension ({n}) is the batch",
            f"with sample 0 changed, outputs of other samples change by {worst:.2g} of their size; "
            f"{second[0]} was created with batch_first=False, and expects (length, batch, features)",
            "Create it with batch_first=True, or pass the batch in the second dimension.",
            where=place_of(c.model, second[0]),
            change=worst,
        )
        return
    yield sure(
        Cause.LEAK,
        "samples of a batch influence each other",
        f"with sample 0 changed, outputs of other samples change by {worst:.2g} of their size, "
        "with batch norm in evaluation mode",
        "Look for batch_first, softmax or normalisation over dimension 0, and view or reshape across the batch.",
        where=place_of(c.model, second[0]) if second else "",
        change=worst,
    )


def _uses_batch_stats(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


def _labelled_per_sample(c: PreflightContext, n: int) -> bool:
    return any(call.target.dim() >= 1 and call.target.shape[0] == n for call in c.first.loss_calls)


def independent_of_inputs(c: PreflightContext) -> Iterator[PreflightFinding]:
    """Inputs of zero, and those of other samples, give the same outputs."""
    base = c.base
    if all(bool((out == 0).all()) for out in base.outputs):
        return  # a last layer of zeros, before the first update

    def zeroed(tensors: list[Tensor]) -> list[Tensor]:
        return [torch.zeros_like(t) if t.is_floating_point() else t.roll(1, 0) if t.dim() else t for t in tensors]

    def exchanged(tensors: list[Tensor]) -> list[Tensor]:
        return [t.roll(1, 0) if t.dim() else t for t in tensors]

    outputs = [c.repeat(change).outputs for change in (zeroed, exchanged)]
    if c.batch_size < 2 or any(len(o) != len(base.outputs) for o in outputs):
        raise CannotTell("the batch has no size")
    inputs = [t for t in c.first.inputs if t.dim() and t.shape[0] == c.batch_size]
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
