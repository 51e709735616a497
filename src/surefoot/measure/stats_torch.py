"""Per-tensor statistics and their summary in plain torch operations, for devices without Triton."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from surefoot.measure.block_layout import (
    MAX_MICROBATCHES,
    NONFINITE_COLUMN,
    NORM_COLUMN,
    UNITS_START,
    SummarySlot,
)
from surefoot.records import LAYER_STATS

FP16_MIN_NORMAL = 6.1e-5
"""Smallest normal float16."""
FP16_MIN_SUBNORMAL = 5.96e-8
"""Smallest float16 above zero."""
ABSENT = (0.0, 0.0, 0.0, 0.0, 0.0, -1.0, 0.0, 0.0)
"""The row of a tensor that had no gradient."""
_SMALL = 1 << 13
"""CPU tensors with up to this many elements are measured together."""
_PIECE = 1 << 17
"""Elements measured at a time on the CPU: the scratch memory stays in the cache and does not grow."""


class StatsBackend(Protocol):
    """Measures a list of tensors into one row of `LAYER_STATS` each."""

    def measure(self, tensors: Sequence[Tensor | None], *, out: Tensor, scale: Tensor | None = None) -> None: ...


class Summariser(Protocol):
    """Writes squares and non-finite counts of each unit to `summary`, adds the loss, and fills the microbatch's line.

    `weight`, if given, multiplies the loss.
    """

    def __call__(
        self,
        stats: Tensor,
        *,
        owned: Tensor,
        loss: Tensor | None,
        weight: Tensor | None = None,
        summary: Tensor,
        microbatches: Tensor,
        microbatch: int,
    ) -> None: ...


class TorchStats:
    """Measures a list of tensors into one row each: `measure(tensors, out=..., scale=...)`."""

    def __init__(self, numels: Sequence[int], device: torch.device) -> None:
        self.numels = tuple(numels)
        self.device = device
        self._absent = torch.tensor(ABSENT, device=device)

    def measure(self, tensors: Sequence[Tensor | None], *, out: Tensor, scale: Tensor | None = None) -> None:
        """Write one row of `LAYER_STATS` per tensor into `out`; `scale` divides every value first."""
        if self.device.type == "cpu":
            inverse = 1.0 if scale is None else _inverse(float(scale))  # a read on the CPU waits for nothing
            out.copy_(torch.from_numpy(_rows_on_host(tensors, self.numels, inverse)))
            return
        for i, (t, n) in enumerate(zip(tensors, self.numels, strict=True)):
            out[i].copy_(self._absent if t is None else _row_on_device(t, n, scale))


def _inverse(scale: float) -> float:
    """1 / scale, limited to the float32 range when the scale has collapsed to almost zero."""
    limit = float(np.finfo(np.float32).max)
    return min(1.0 / scale, limit) if scale else limit


def _rows_on_host(tensors: Sequence[Tensor | None], numels: Sequence[int], inverse: float) -> np.ndarray:
    """All rows on the CPU; small tensors are measured together, because a call costs more than their work."""
    rows = np.empty((len(tensors), len(LAYER_STATS)), np.float32)
    small: list[int] = []
    values: list[np.ndarray] = []
    for i, (t, n) in enumerate(zip(tensors, numels, strict=True)):
        if t is None:
            rows[i] = ABSENT
        elif 0 < t.numel() <= _SMALL and t.dtype is torch.float32 and t.layout is torch.strided:
            small.append(i)
            values.append(t.detach().numpy().reshape(-1))
        else:
            with np.errstate(over="ignore"):
                rows[i] = _row_on_host(t, n, inverse)
    if len(small) > 1 and _small_rows_on_host(rows, small, values, inverse):
        return rows
    for i in small:
        t = tensors[i]
        assert t is not None
        rows[i] = _row_on_host(t, numels[i], inverse)
    return rows


def _small_rows_on_host(rows: np.ndarray, indices: Sequence[int], values: list[np.ndarray], inverse: float) -> bool:
    """Fill the rows of small, finite tensors from one flat array; False when a value in it is not finite."""
    flat = np.concatenate(values)
    if inverse != 1.0:
        with np.errstate(over="ignore"):  # an overflow counts as non-finite
            flat = flat * np.float32(inverse)
    size = np.abs(flat)
    if not math.isfinite(float(size.max())):
        return False
    counts = np.fromiter(map(len, values), np.int64)
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    flat64 = flat.astype(np.float64)
    mean = np.add.reduceat(flat64, starts) / counts
    m2 = np.add.reduceat(np.square(flat64 - np.repeat(mean, counts)), starts)
    num_zeros = np.add.reduceat(size == 0, starts, dtype=np.int64)
    below_normal = np.add.reduceat(size < FP16_MIN_NORMAL, starts, dtype=np.int64)
    below_subnormal = np.add.reduceat(size < FP16_MIN_SUBNORMAL, starts, dtype=np.int64)
    with np.errstate(over="ignore"):
        rows[indices, 0] = np.sqrt(m2 + counts * np.square(mean))
    rows[indices, 1] = mean
    rows[indices, 2] = np.sqrt(m2 / np.maximum(counts - 1, 1))
    rows[indices, 3] = np.maximum.reduceat(size, starts)
    rows[indices, 4] = num_zeros / counts
    rows[indices, 5] = 0.0
    rows[indices, 6] = (below_normal - num_zeros) / counts
    rows[indices, 7] = (below_subnormal - num_zeros) / counts
    return True


def flat_values(tensor: Tensor) -> Tensor:
    """The stored elements of any tensor as one flat real tensor; a sparse tensor is coalesced first."""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.reshape(-1)


def _row_on_host(tensor: Tensor, numel: int, inverse: float) -> tuple[float, ...]:
    """One row on the CPU, where reading a value is free and a finite tensor can skip the non-finite handling."""
    values = flat_values(tensor.detach())
    numel = max(numel, values.numel())
    count = total = m2 = squares = absmax = zeros = nonfinite = tiny = sub = 0.0
    for piece in values.split(_PIECE) if values.numel() else ():
        piece = piece if piece.dtype is torch.float64 else piece.float()
        if inverse != 1.0:
            piece = piece * inverse
        norm = float(torch.linalg.vector_norm(piece))
        if not math.isfinite(norm):
            finite = piece.isfinite()
            nonfinite += piece.numel() - int(torch.count_nonzero(finite))
            piece = piece[finite]
            norm = float(torch.linalg.vector_norm(piece))  # still infinite where finite squares overflow
        n = piece.numel()
        if n == 0:
            continue
        squares += norm * norm
        mean = float(piece.sum()) / n
        shift = mean - (total / count if count else mean)
        deviation = float(torch.linalg.vector_norm(piece - mean))
        m2 += deviation * deviation + shift * shift * count * n / (count + n)
        count += n
        total += mean * n
        low, high = torch.aminmax(piece)
        absmax = max(absmax, -float(low), float(high))
        size = np.abs(piece.numpy())  # NumPy compares and counts several times faster than torch on a CPU
        below_normal = np.count_nonzero(size < FP16_MIN_NORMAL)
        below_subnormal = np.count_nonzero(size < FP16_MIN_SUBNORMAL) if below_normal else 0
        num_zeros = n - np.count_nonzero(size) if below_subnormal else 0
        zeros += num_zeros
        tiny += below_normal - num_zeros
        sub += below_subnormal - num_zeros
    missing = numel - values.numel()  # zeros that a sparse tensor does not store
    zeros += missing
    m2 += total * total / count * missing / (count + missing) if count else 0.0
    count += missing
    elements = max(numel, 1)
    return (
        math.nan if nonfinite else math.sqrt(squares),
        total / count if count else 0.0,
        math.sqrt(m2 / (count - 1)) if count > 1 else 0.0,
        absmax,
        zeros / elements,
        nonfinite,
        tiny / elements,
        sub / elements,
    )


def _row_on_device(tensor: Tensor, numel: int, scale: Tensor | None) -> Tensor:
    """One row on a device, without reading a value back."""
    values = flat_values(tensor.detach())
    values = values if values.dtype is torch.float64 else values.float()
    if scale is not None:
        values = values / scale
    numel = max(numel, values.numel())
    if values.numel() == 0:
        empty = torch.zeros(len(LAYER_STATS), device=values.device)
        empty[LAYER_STATS.index("zeros")] = 1.0 if numel else 0.0  # a sparse tensor that stores nothing is all zeros
        return empty
    finite = values.isfinite()
    clean = values.where(finite, 0.0)
    missing = numel - values.numel()
    num_finite = finite.sum() + missing
    nonfinite = values.numel() - finite.sum()
    size = clean.abs()
    num_zeros = (finite & (size == 0)).sum()
    mean = clean.sum() / num_finite.clamp(min=1)
    m2 = (clean - mean).where(finite, 0.0).square().sum() + mean.square() * missing
    norm = torch.linalg.vector_norm(clean).where(nonfinite == 0, math.nan)
    excluded = nonfinite + num_zeros  # zero in `size`, but neither tiny nor sub
    row = (
        norm,
        mean,
        (m2 / (num_finite - 1).clamp(min=1)).sqrt(),
        size.amax(),
        (num_zeros + missing) / numel,
        nonfinite,
        ((size < FP16_MIN_NORMAL).sum() - excluded) / numel,
        ((size < FP16_MIN_SUBNORMAL).sum() - excluded) / numel,
    )
    return torch.stack([value.to(torch.float32) for value in row])


def torch_summariser(units: Sequence[slice]) -> Summariser:
    """The summariser in plain torch operations."""

    def summarise(
        stats: Tensor,
        *,
        owned: Tensor,
        loss: Tensor | None,
        weight: Tensor | None = None,
        summary: Tensor,
        microbatches: Tensor,
        microbatch: int,
    ) -> None:
        squares = stats[:, NORM_COLUMN].to(summary.dtype).square().where(owned != 0, 0.0)
        nonfinite = stats[:, NONFINITE_COLUMN].clamp(min=0)
        for u, span in enumerate(units):
            summary[UNITS_START + 2 * u] = squares[span].sum()
            summary[UNITS_START + 2 * u + 1] = nonfinite[span].sum()
        line = microbatches[min(microbatch, MAX_MICROBATCHES - 1)]
        line[1] = summary[UNITS_START::2].sum()
        line[2] = summary[UNITS_START + 1 :: 2].sum()
        if loss is not None:
            loss = loss.reshape(()).to(summary.dtype)
            loss = loss if weight is None else loss * weight.reshape(()).to(summary.dtype)
            line[0] = loss
            summary[SummarySlot.LOSS] = loss + (summary[SummarySlot.LOSS] if microbatch else 0.0)
            summary[SummarySlot.NUM_MICROBATCHES] = microbatch + 1

    return summarise
