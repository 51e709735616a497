"""Per-tensor gradient statistics by plain torch operations, for every device that has no Triton."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from surefoot.records import LAYER_STATS

HALF_NORMAL = 6.1e-5
"""Smallest normal float16."""
HALF_LEAST = 5.96e-8
"""Smallest float16 that is not zero."""
ABSENT = (0.0, 0.0, 0.0, 0.0, 0.0, -1.0, 0.0, 0.0)
"""The row of a tensor that had no gradient."""
_SMALL = 1 << 13
"""Elements up to which a tensor on the CPU is looked at together with others."""
_PIECE = 1 << 17
"""Elements looked at together on the CPU: the scratch stays in the cache, and memory stays flat."""


class TorchStats:
    """Measures a list of tensors into one row each: `measure(tensors, out=..., scale=...)`."""

    def __init__(self, numels: Sequence[int], device: torch.device) -> None:
        self.numels = tuple(numels)
        self.device = device
        self._absent = torch.tensor(ABSENT, device=device)

    def measure(self, tensors: Sequence[Tensor | None], *, out: Tensor, scale: Tensor | None = None) -> None:
        """Write one row of `LAYER_STATS` per tensor into `out`; `scale` divides every value first."""
        if self.device.type == "cpu":
            inverse = 1.0 if scale is None else _inverse(float(scale))  # the CPU has nothing to wait for
            out.copy_(torch.from_numpy(_all_on_host(tensors, self.numels, inverse)))
            return
        for i, (t, n) in enumerate(zip(tensors, self.numels, strict=True)):
            out[i].copy_(self._absent if t is None else _on_device(t, n, scale))


def _inverse(scale: float) -> float:
    """What brings a loss scale down to 1; kept within float32 when the scale has collapsed to next to nothing."""
    most = float(np.finfo(np.float32).max)
    return min(1.0 / scale, most) if scale else most


def _all_on_host(tensors: Sequence[Tensor | None], numels: Sequence[int], inverse: float) -> np.ndarray:
    """All rows on the CPU; the small tensors together, since there a call costs more than its work."""
    rows = np.empty((len(tensors), len(LAYER_STATS)), np.float32)
    small: list[int] = []
    for i, (t, n) in enumerate(zip(tensors, numels, strict=True)):
        if t is None:
            rows[i] = ABSENT
        elif 0 < t.numel() <= _SMALL and t.dtype is torch.float32 and t.layout is torch.strided:
            small.append(i)
        else:
            with np.errstate(over="ignore"):
                rows[i] = _on_host(t, n, inverse)
    if len(small) > 1 and _together(rows, small, [t for i in small if (t := tensors[i]) is not None], inverse):
        return rows
    for i in small:
        t = tensors[i]
        assert t is not None
        rows[i] = _on_host(t, numels[i], inverse)
    return rows


def _together(rows: np.ndarray, where: Sequence[int], tensors: Sequence[Tensor], inverse: float) -> bool:
    """Fill the rows of small, finite tensors from one flat array; False when something in it is not finite."""
    flat = np.concatenate([t.detach().numpy().reshape(-1) for t in tensors])
    if inverse != 1.0:
        with np.errstate(over="ignore"):  # what overflows is not finite, and is counted as that
            flat = flat * np.float32(inverse)
    size = np.abs(flat)
    if not math.isfinite(float(size.max())):
        return False
    counts = np.array([t.numel() for t in tensors])
    starts = np.concatenate(([0], np.cumsum(counts)[:-1]))
    wide = flat.astype(np.float64)
    mean = np.add.reduceat(wide, starts) / counts
    spread = np.add.reduceat(np.square(wide - np.repeat(mean, counts)), starts)
    none, under, least = (
        np.add.reduceat(mask, starts, dtype=np.int64) for mask in (size == 0, size < HALF_NORMAL, size < HALF_LEAST)
    )
    with np.errstate(over="ignore"):
        rows[where, 0] = np.sqrt(spread + counts * np.square(mean))
    rows[where, 1] = mean
    rows[where, 2] = np.sqrt(spread / np.maximum(counts - 1, 1))
    rows[where, 3] = np.maximum.reduceat(size, starts)
    rows[where, 4] = none / counts
    rows[where, 5] = 0.0
    rows[where, 6] = (under - none) / counts
    rows[where, 7] = (least - none) / counts
    return True


def flat_values(tensor: Tensor) -> Tensor:
    """The stored elements of any tensor as one flat real tensor; for a sparse one, each once."""
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    elif tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.reshape(-1)


def _on_host(tensor: Tensor, numel: int, inverse: float) -> tuple[float, ...]:
    """One row on the CPU, where looking at a value costs nothing and a clean tensor can take the short way."""
    values = flat_values(tensor.detach())
    numel = max(numel, values.numel())
    count = total = m2 = squares = largest = zeros = nonfinite = tiny = sub = 0.0
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
        spread = float(torch.linalg.vector_norm(piece - mean))
        m2 += spread * spread + shift * shift * count * n / (count + n)
        count += n
        total += mean * n
        low, high = torch.aminmax(piece)
        largest = max(largest, -float(low), float(high))
        size = np.abs(piece.numpy())  # NumPy compares and counts several times faster than torch on a CPU
        under = np.count_nonzero(size < HALF_NORMAL)
        least = np.count_nonzero(size < HALF_LEAST) if under else 0
        none = n - np.count_nonzero(size) if least else 0
        zeros += none
        tiny += under - none
        sub += least - none
    missing = numel - values.numel()  # the zeros that a sparse tensor does not store
    zeros += missing
    m2 += total * total / count * missing / (count + missing) if count else 0.0
    count += missing
    whole = max(numel, 1)
    return (
        math.nan if nonfinite else math.sqrt(squares),
        total / count if count else 0.0,
        math.sqrt(m2 / (count - 1)) if count > 1 else 0.0,
        largest,
        zeros / whole,
        nonfinite,
        tiny / whole,
        sub / whole,
    )


def _on_device(tensor: Tensor, numel: int, scale: Tensor | None) -> Tensor:
    """One row on a device, without ever asking it for a value."""
    values = flat_values(tensor.detach())
    values = values if values.dtype is torch.float64 else values.float()
    if scale is not None:
        values = values / scale
    numel = max(numel, values.numel())
    if values.numel() == 0:
        nothing = torch.zeros(len(LAYER_STATS), device=values.device)
        nothing[4] = 1.0 if numel else 0.0  # a sparse tensor that stores nothing is all zeros
        return nothing
    finite = values.isfinite()
    clean = values.where(finite, 0.0)
    missing = numel - values.numel()
    kept = finite.sum() + missing
    nonfinite = values.numel() - finite.sum()
    size = clean.abs()
    none = (finite & (size == 0)).sum()
    mean = clean.sum() / kept.clamp(min=1)
    m2 = (clean - mean).where(finite, 0.0).square().sum() + mean.square() * missing
    norm = torch.linalg.vector_norm(clean).where(nonfinite == 0, math.nan)
    bad = nonfinite + none
    row = (
        norm,
        mean,
        (m2 / (kept - 1).clamp(min=1)).sqrt(),
        size.amax(),
        (none + missing) / numel,
        nonfinite,
        ((size < HALF_NORMAL).sum() - bad) / numel,
        ((size < HALF_LEAST).sum() - bad) / numel,
    )
    return torch.stack([value.to(torch.float32) for value in row])
