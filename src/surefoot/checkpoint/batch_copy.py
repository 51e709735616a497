"""A batch as it can be kept: a copy in plain containers, and no larger than it has to be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

LARGEST = 1 << 24
"""Bytes of a batch that are kept; of a larger one only the first samples."""
_BARE = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)


def kept(batch: Any, largest: int = LARGEST) -> Any:
    """A copy of a batch, with dicts for mappings and tuples for tuples of any kind; raises TypeError, ValueError."""
    size = sum(t.nbytes for t in _tensors(batch) if isinstance(t, np.ndarray) or t.layout is torch.strided)
    if size > largest:
        batch = _cut(batch, size, largest)
    return _copied(batch)


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        if type(value) is not Tensor or value.layout is not torch.strided or value.is_meta:
            raise TypeError(f"a {type(value).__name__} of layout {value.layout} cannot be kept in a checkpoint")
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    return _mapped(value, _copied)


def _mapped(value: Any, each: Any) -> Any:
    """The same nesting of plain containers, with something done to each part."""
    if isinstance(value, _BARE):
        return value
    if isinstance(value, Mapping):
        return {k: each(v) for k, v in value.items()}
    if isinstance(value, list):
        return [each(v) for v in value]
    if isinstance(value, tuple):
        return tuple(each(v) for v in value)
    raise TypeError(f"a {type(value).__name__} inside the batch cannot be kept in a checkpoint")


def _tensors(value: Any) -> Iterator[Tensor | np.ndarray]:
    if isinstance(value, Tensor | np.ndarray):
        yield value
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from _tensors(v)
    elif isinstance(value, list | tuple):
        for v in value:
            yield from _tensors(v)


def _cut(batch: Any, size: int, largest: int) -> Any:
    """The first samples, if it can be told what a sample is: all tensors begin with the same number of them."""
    counts = {t.shape[0] for t in _tensors(batch) if t.ndim}
    samples = counts.pop() if len(counts) == 1 else 0
    fit = samples * largest // size
    if fit < 1:
        raise ValueError(f"it takes {size:,} bytes, more than {largest:,}, and cannot be cut into samples")

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor | np.ndarray):
            return value[:fit] if value.ndim else value
        texts = isinstance(value, list | tuple) and len(value) == samples and next(_tensors(value), None) is None
        return value[:fit] if texts else _mapped(value, cut)

    return cut(batch)
