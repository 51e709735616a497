"""Whether processes that should hold the same weights do: a checksum of the bits of every replicated parameter."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surefoot.measure.layout import local

_GOLDEN = 0x1E3779B97F4A7C15
_COLUMNS = 256
"""Words next to each other are added up apart, so that changes beside each other do not cancel."""


class ReplicaChecksum:
    """Adds up the bits of the replicated parameters as whole numbers: exact in any order, and without a wait."""

    def __init__(self, params: Sequence[Tensor], replicated: Sequence[bool], device: torch.device) -> None:
        self._params = [p for p, same in zip(params, replicated, strict=True) if same]
        self._device = device
        count = torch.arange(len(self._params) * _COLUMNS, dtype=torch.int64, device=device)
        self._factors = ((2 * count + 1) * _GOLDEN).view(-1, _COLUMNS)
        """An odd one for each sum, so that values that change places change the checksum."""

    @property
    def covers(self) -> bool:
        """Whether there is anything to compare."""
        return bool(self._params)

    @torch.no_grad()
    def measure(self, out: Tensor) -> None:
        """Checksum and norm of the parameters as they are now, into the two places of `out`."""
        parts = [local(p.detach()) for p in self._params]
        sums = torch.stack([_sums(t).to(self._device, non_blocking=True) for t in parts])
        out[0] = _fitting((sums * self._factors).sum(), out.dtype)
        norms = [n.to(self._device, torch.float32, non_blocking=True) for n in torch._foreach_norm(parts)]
        out[1] = torch.linalg.vector_norm(torch.stack(norms))


def checksum(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Of the bits of one small tensor, as a real number that holds it exactly."""
    return _fitting(_words(values).sum(dtype=torch.int64), dtype)


def _fitting(number: Tensor, dtype: torch.dtype) -> Tensor:
    """As many of the low bits as a real number of this type holds exactly."""
    return (number & ((1 << 52) - 1 if dtype is torch.float64 else (1 << 23) - 1)).to(dtype)


def _sums(tensor: Tensor) -> Tensor:
    """The words of each column added up, modulo 2^32."""
    words = _words(tensor)
    whole = words.numel() - words.numel() % _COLUMNS
    sums = words[:whole].view(-1, _COLUMNS).sum(0, dtype=torch.int32)
    if whole < words.numel():
        sums[: words.numel() - whole] += words[whole:]
    return sums


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor, 32 at a time; of one with an odd number of half words, 16 at a time."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    size = flat.element_size()
    if flat.storage_offset() * size % 4:
        flat = flat.clone()
    if flat.numel() * size % 4:
        return flat.view(torch.int16 if size == 2 else torch.int8).to(torch.int32)
    return flat.view(torch.int32)
