"""Splits a batch into smaller ones with the same samples in the same order, whatever containers its tensors are in."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from torch import Tensor

from surefoot.data.language_dataset import IGNORE_INDEX
from surefoot.train.accumulation import target_count
from surefoot.trials.kept_steps import tensors_in


class CannotSplit(ValueError):
    """It is not known which part of the batch belongs to which sample; the message says why."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a batch, or the whole of it."""

    batch: Any
    share: float = 1.0
    """Of the batch's mean loss: its share of the targets where they are counted, else of the samples."""


def split_batch(batch: Any, size: int, *, at_least: int = 1, largest: int | None = None) -> list[Piece]:
    """The batch in pieces of `size` samples; a rest of fewer than `at_least` is left in the piece before it.

    Each keeps its own "count" of targets. A batch of more than `largest` samples is not one of samples.
    """
    samples = num_samples(batch)
    if not samples or (largest is not None and samples > largest):
        raise CannotSplit(
            f"the first tensor of a batch has {samples} rows, and batch.size is {largest}: its rows are not samples"
        )
    starts = list(range(0, samples, size))
    if len(starts) > 1 and samples - starts[-1] < at_least:
        starts.pop()
    ends = [*starts[1:], samples]
    parts = [_rows(batch, start, end, samples) for start, end in zip(starts, ends, strict=True)]
    counts, total = _counts(batch, parts), target_count(batch)
    if counts is None:
        return [Piece(p, (end - start) / samples) for p, start, end in zip(parts, starts, ends, strict=True)]
    for part, count in zip(parts, counts, strict=True):
        whole = part["count"]
        if not isinstance(whole, Tensor):
            part["count"] = count
        elif not whole.dim():
            part["count"] = whole.new_tensor(count)
    return [Piece(part, count / total if total else 0.0) for part, count in zip(parts, counts, strict=True)]


def _counts(batch: Any, parts: Sequence[Any]) -> list[int] | None:
    """The targets of each part, for a batch with a count; None for one without."""
    total = target_count(batch)
    if total is None:
        return None
    ways = [
        [target_count(part) or 0 for part in parts],  # of each sample
        [num_samples(part) for part in parts],
        *_label_counts(batch, parts),
    ]
    counts = next((counts for counts in ways if counts and sum(counts) == total), None)
    if counts is None:
        raise CannotSplit(
            f'the "count" of a batch is {total}, and it is not known how many of them belong to each sample. Make it a '
            "tensor with one number per sample"
        )
    return counts


def _label_counts(batch: Mapping[str, Any], parts: Sequence[Mapping[str, Any]]) -> Iterator[list[int]]:
    """For each tensor of integers: the values that are not ignored, in each part."""
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.dim() and not value.is_floating_point():
            yield [int((part[name] != IGNORE_INDEX).sum()) for part in parts]
            yield [int((part[name] != 0).sum()) for part in parts]  # a mask


def num_samples(batch: Any) -> int:
    """The rows of the first tensor that has any; 0 where there is none."""
    return next((t.shape[0] for t in tensors_in(batch) if t.dim()), 0)


def _rows(value: Any, start: int, end: int, samples: int) -> Any:
    """These rows of everything that has one for each sample; the tensors share their memory with the batch."""
    if isinstance(value, Tensor):
        if value.dim() and value.shape[0] != samples:
            shape = "x".join(map(str, value.shape))
            raise CannotSplit(f"a batch of {samples} samples holds a tensor of shape {shape}")
        return value[start:end] if value.dim() else value
    if isinstance(value, list | tuple):
        batched = any(t.dim() and t.shape[0] == samples for t in tensors_in(value))
        if len(value) == samples and not batched:
            parts = value[start:end]
        else:
            parts = [_rows(part, start, end, samples) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, MutableMapping):
        taken = copy.copy(value)
        for name, part in value.items():
            taken[name] = _rows(part, start, end, samples)
        return taken
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _rows(getattr(value, f.name), start, end, samples) for f in fields(value)})
    return value
