"""Facts about the batches: repeated, sorted, constant, of unusual scale, or shared with the held-out data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from surefoot.checkpoint.tree import tensors_in
from surefoot.kinds import Cause
from surefoot.preflight_checks.findings import PreflightFinding, doubtful, sure
from surefoot.preflight_checks.loop_probe import PreflightContext
from surefoot.preflight_checks.observe import Observation

FEW_BATCHES = 4
DUPLICATES = 0.2
LARGE, UNEVEN = 30.0, 1e3
"""Scale of inputs that is unusual, and ratio between the scales of features."""
_NORMS = (nn.LayerNorm, nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.RMSNorm)


def repeated_batches(c: PreflightContext) -> Iterator[PreflightFinding]:
    hashes = [_batch_hash(batch) for batch in c.batches]
    if len(hashes) < 2:
        return
    if len(set(hashes)) == 1:
        yield doubtful(
            Cause.REPEATED_DATA,
            "every batch is the same",
            f"{len(hashes)} batches are equal in every bit",
            "Unless the whole data is one batch, fetch a new one at each step: next(iter(loader)) starts over.",
        )
        return
    again = len(hashes) - len(set(hashes))
    if again:
        in_a_row = any(a == b for a, b in itertools.pairwise(hashes))
        make = sure if in_a_row else doubtful  # a small data set comes again
        yield make(
            Cause.REPEATED_DATA,
            "batches are repeated",
            f"{again} of {len(hashes)} batches are equal in every bit to an earlier one",
            "Seed each data worker differently, and give each a part of the data of its own.",
            repeated=again,
        )
        return
    rows = [h for batch in c.batches for h in _row_hashes(batch, c.batch_size)]
    share = 1 - len(set(rows)) / len(rows) if rows else 0.0
    if share > DUPLICATES:
        yield doubtful(
            Cause.REPEATED_DATA,
            "many samples are repeated",
            f"{share:.0%} of {len(rows)} samples were seen before in these batches".replace("%", " %"),
            "Look for duplicates in the data, and for augmentation that draws the same numbers in each worker.",
            share=share,
        )


def _batch_hash(batch: Any) -> int:
    digest = xxhash.xxh3_64()
    for t in tensors_in(batch):
        digest.update(_bytes(t))
    return digest.intdigest()


def _row_hashes(batch: Any, n: int) -> Iterator[int]:
    """One for each sample with more than a few values."""
    rows = [t for t in tensors_in(batch) if t.dim() >= 2 and t.shape[0] == n and t[0].numel() >= 8]
    for i in range(n if rows else 0):
        digest = xxhash.xxh3_64()
        for t in rows:
            digest.update(_bytes(t[i]))
        yield digest.intdigest()


def _bytes(t: Tensor) -> bytes:
    t = t.detach().cpu().contiguous()
    return t.reshape(-1).view(torch.uint8).numpy().tobytes() if t.numel() else b""


def sorted_by_class(c: PreflightContext) -> Iterator[PreflightFinding]:
    labels = _class_labels(c)
    if len(labels) < FEW_BATCHES or min(len(b) for b in labels) < 4:
        return
    kinds = [int(b.unique().numel()) for b in labels]
    everything = torch.cat(labels)
    if int(everything.unique().numel()) == 1:
        yield doubtful(
            Cause.DATA_ORDER,
            f"all labels are {int(everything[0])}",
            f"{len(everything)} samples in {len(labels)} batches",
            "Shuffle the data if it is sorted by class; otherwise look at how labels are read.",
        )
        return
    rises = all(bool((b[1:] >= b[:-1]).all()) for b in labels)
    steps = sum(int(b[0] < a[-1]) for a, b in itertools.pairwise(labels))
    total = int(everything.unique().numel())
    if sum(k == 1 for k in kinds) > len(kinds) / 2 or (rises and steps <= len(labels) // 4 and total > 2):
        yield sure(
            Cause.DATA_ORDER,
            "the data is sorted by class",
            f"{sum(k == 1 for k in kinds)} of {len(kinds)} batches have a single label, and there are {total} labels",
            "Shuffle: DataLoader(..., shuffle=True).",
        )


def _class_labels(c: PreflightContext) -> list[Tensor]:
    """One label per sample, of each batch."""
    labels: list[Tensor] = []
    for index in range(min(len(c.batches), 12)):
        call = c.quick(index).single_loss
        if call is None or call.target.dim() == 0 or call.target.numel() != call.target.shape[0]:
            return []
        if call.name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"):
            return []
        target = call.target.detach().reshape(-1)
        if target.is_floating_point() and not bool((target == target.round()).all()):
            return []
        labels.append(target)
    return labels


def input_scale(c: PreflightContext) -> Iterator[PreflightFinding]:
    """Values far from a mean of 0 and a standard deviation of 1, unless the first layer normalises them."""
    if _normalises_first(c.model, c.first):
        return
    for t in c.first.inputs:
        if not t.is_floating_point() or t.dim() < 2 or t.numel() < 16:
            continue
        if bool((t == t.reshape(-1)[0]).all()):
            if t.numel() > 64 and float(t.reshape(-1)[0]) not in (0.0, 1.0):
                yield doubtful(
                    Cause.INPUT_SCALE, "an input is constant", f"all {t.numel()} values are equal", "Look at the data."
                )
            continue
        features = t.detach().float().reshape(-1, t.shape[-1]) if t.dim() == 2 else t.detach().float().reshape(-1, 1)
        size = features.square().mean(0).sqrt()
        largest, smallest = float(size.max()), float(size[size > 0].min())
        if largest > LARGE or (largest / smallest > UNEVEN and largest > 5):
            yield doubtful(
                Cause.INPUT_SCALE,
                "inputs are not normalised",
                f"mean {float(t.mean()):.3g}, standard deviation {float(t.float().std()):.3g}; "
                f"features have sizes from {smallest:.2g} to {largest:.3g}",
                "Scale inputs to a mean of 0 and a standard deviation of 1.",
                largest=largest,
                smallest=smallest,
            )
            return


def _normalises_first(model: nn.Module, seen: Observation) -> bool:
    layers = [m for m in model.modules() if not list(m.children()) and any(True for _ in m.parameters())]
    return bool(layers) and isinstance(layers[0], _NORMS)


def held_out_overlap(c: PreflightContext) -> Iterator[PreflightFinding]:
    held_out: Sequence[Any] = c.settings.eval_batches
    if not held_out:
        return
    trained = {h for batch in c.batches for h in _row_hashes(batch, c.batch_size)}
    rows = [h for batch in held_out for h in _row_hashes(batch, _size(batch))]
    shared = sum(h in trained for h in rows)
    if shared:
        yield sure(
            Cause.LEAK,
            "held-out samples are trained on too",
            f"{shared} of {len(rows)} held-out samples are among the training samples looked at",
            "Split the data before it is shuffled, augmented or cut into pieces.",
            shared=shared,
        )


def _size(batch: Any) -> int:
    sizes = [t.shape[0] for t in tensors_in(batch) if t.dim()]
    return sizes[0] if sizes else 0


FACTS = (repeated_batches, sorted_by_class, input_scale, held_out_overlap)
