"""Takes samples out of a batch, whatever containers its tensors are in, without changing any shape."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from surefoot.checkpoint.tree import tensors_in


def num_samples(batch: Any) -> int:
    """The first dimension of the batch's first tensor that has one; 0 where there is none."""
    return next((t.shape[0] for t in tensors_in(batch) if t.dim()), 0)


def only_samples(batch: Any, samples: Sequence[int]) -> Any:
    """The batch with only these samples in it, each at its place; the places of the others are filled with the same
    samples again, so that the batch is as large and as padded as before."""
    kept = set(samples)
    rows = [i if i in kept else samples[i % len(samples)] for i in range(num_samples(batch))]
    return _take(batch, rows)


def _take(value: Any, rows: list[int]) -> Any:
    if isinstance(value, Tensor):
        if not value.dim() or value.shape[0] != len(rows):
            return value
        return value.detach().index_select(0, torch.tensor(rows, device=value.device))
    if isinstance(value, list | tuple):
        if len(value) == len(rows) and not any(_is_batched(part, len(rows)) for part in value):
            parts = [value[i] for i in rows]
        else:
            parts = [_take(part, rows) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, MutableMapping):
        taken = copy.copy(value)
        for name, part in value.items():
            taken[name] = _take(part, rows)
        return taken
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _take(getattr(value, f.name), rows) for f in fields(value) if f.init})
    return value


def _is_batched(value: Any, size: int) -> bool:
    return any(t.dim() and t.shape[0] == size for t in tensors_in(value))
