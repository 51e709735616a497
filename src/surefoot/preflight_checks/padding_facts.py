"""Facts about padding: it does not count in the loss, and does not influence other places."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from surefoot.kinds import Cause
from surefoot.preflight_checks.findings import PreflightFinding, doubtful, sure
from surefoot.preflight_checks.loop_probe import PreflightContext
from surefoot.preflight_checks.target_facts import counting, relative_change

PADDED = 0.05
"""Fraction of the places that count and are padding."""


def padding_counted(c: PreflightContext) -> Iterator[PreflightFinding]:
    """The same token at the end of several rows, at places that count."""
    call = c.first.main_loss
    if call is None or call.name not in ("cross_entropy", "nll_loss") or call.target.is_floating_point():
        return
    batch = c.batch_size
    if batch < 2 or call.target.numel() % batch or call.target.numel() // batch < 4:
        return
    targets = call.target.reshape(batch, -1)
    if call.target.dim() > 2:
        return  # pixels
    counts = counting(c.first, call).reshape(batch, -1)
    found = _end_runs(targets, counts)
    if found is None:
        return
    token, share = found
    inputs = [t for t in c.first.inputs if t.dim() == 2 and not t.is_floating_point() and t.shape[0] == batch]
    in_inputs = any(bool((t[:, -1] == token).any()) for t in inputs)
    make = sure if in_inputs and share > 2 * PADDED else doubtful
    yield make(
        Cause.PADDING,
        f"padding counts in the loss: token {token}",
        f"{share:.0%} of the targets that count are the same token at the end of sequences".replace("%", " %"),
        f"Leave it out: cross_entropy(..., ignore_index={token}), or targets of -100 there.",
        share=share,
        token=token,
    )


def _end_runs(targets: Tensor, counts: Tensor) -> tuple[int, float] | None:
    """The token that ends several rows in runs of different lengths, and its share of what counts."""
    for last in (targets[:, -1].flip(0).mode().values, targets[:, 0].mode().values):
        token = int(last)
        same = targets == token
        for flipped in (same.flip(1), same):
            runs = flipped.int().cumprod(1).sum(1)
            if int((runs >= 2).sum()) < 2 or int(runs.unique().numel()) < 2:
                continue
            in_runs = flipped.int().cumprod(1).bool()
            in_runs = in_runs.flip(1) if flipped is not same else in_runs
            share = float((in_runs & counts).sum()) / max(int(counts.sum()), 1)
            elsewhere = float((same & ~in_runs).sum()) / max(int((~in_runs).sum()), 1)
            if share >= PADDED and elsewhere < 0.2:
                return token, share
    return None


def padding_seen(c: PreflightContext) -> Iterator[PreflightFinding]:
    """A mask is passed, but what it masks changes the outputs at other places."""
    if len(c.base.model_calls) != 1:
        return
    inputs = c.base.model_calls[0].inputs
    for k, mask in enumerate(inputs):
        if mask.dim() != 2 or not _is_mask(mask):
            continue
        valid = mask.bool()
        if not bool(valid[:, 0].all()) and bool((~valid)[:, 0].all()):
            valid = ~valid  # True where it is padding, as in nn.MultiheadAttention
        for i, x in enumerate(inputs):
            if i == k or x.dim() < 2 or x.shape[:2] != mask.shape:
                continue
            yield from _masked_influence(c, i, valid)


def _is_mask(t: Tensor) -> bool:
    if t.dtype != torch.bool and not (t.unique().numel() == 2 and bool(((t == 0) | (t == 1)).all())):
        return False
    changes = (t[:, 1:] != t[:, :-1]).sum(1)
    return bool((changes <= 1).all()) and bool((changes == 1).any()) and t.shape[1] >= 3


def _masked_influence(c: PreflightContext, index: int, valid: Tensor) -> Iterator[PreflightFinding]:
    def change(tensors: list[Tensor]) -> list[Tensor]:
        x = tensors[index].clone()
        other = x.flip(0).flip(1)
        other = torch.where(other == x, other.roll(1, 1), other)
        x[~valid] = other[~valid]
        return [*tensors[:index], x, *tensors[index + 1 :]]

    base, changed = c.base, c.repeat(change)
    worst = 0.0
    for a, b in zip(base.outputs, changed.outputs, strict=True):
        if a.shape[:2] == valid.shape and a.dim() > 2:
            worst = max(worst, relative_change(a[valid].float(), b[valid].float()))
        elif a.dim() and a.shape[0] == valid.shape[0] and (a.dim() < 2 or a.shape[1] != valid.shape[1]):
            worst = max(worst, relative_change(a.float(), b.float()))
    if worst > 1e-3:
        yield doubtful(
            Cause.PADDING,
            "padded places influence the outputs, although a mask is passed",
            f"with other values at masked places, the other outputs change by {worst:.2g} of their size",
            "Apply the mask in attention, in pooling and in recurrent layers.",
            change=worst,
        )


FACTS = (padding_counted, padding_seen)
