"""Per-tensor gradient statistics on CUDA: all tensors in one Triton launch, nothing waits for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from surefoot.measure import kernels
from surefoot.measure.portable import PortablePass

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ROTATION = 8
"""Pinned address tables: one is rewritten only when the copy before it by this many is long over."""


class FusedPass:
    """Measures a list of tensors into one row each; same numbers and same signature as `PortablePass`."""

    def __init__(self, numels: Sequence[int], device: torch.device) -> None:
        self.numels = tuple(numels)
        self.device = device
        counts = [-(-n // kernels.CHUNK) for n in self.numels]
        self._chunks = sum(counts)
        firsts = torch.tensor([0, *counts], dtype=torch.int64).cumsum(0).to(torch.int32)
        owners = torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), torch.tensor(counts))
        self._firsts = firsts.to(device)
        self._owners = owners.to(device)
        self._sizes = torch.tensor(self.numels, dtype=torch.int64).to(device)
        self._partial = torch.zeros(7 * max(self._chunks, 1), device=device)
        pin = device.type == "cuda"
        self._pinned = [torch.empty(2, len(counts), dtype=torch.int64, pin_memory=pin) for _ in range(_ROTATION)]
        self._turn = 0
        self._odd: dict[int, PortablePass] = {}
        self._last: tuple[tuple[int, ...], tuple[int, ...]] | None = None
        self._sent: tuple[Tensor, int, bool] | None = None
        self._even = all(n % 8 == 0 for n in self.numels)

    def measure(self, tensors: Sequence[Tensor | None], *, out: Tensor, scale: Tensor | None = None) -> None:
        """Write one row of `LAYER_STATS` per tensor into `out`; `scale` divides every value first."""
        flat, odd = self._reach(tensors)
        table, kind, aligned = self._table(flat)
        if self._chunks:
            kernels.measure_chunks[(self._chunks,)](
                table[0],
                self._sizes,
                table[1],
                self._firsts,
                self._owners,
                self._partial if scale is None else scale,
                self._partial,
                self._chunks,
                CHUNK=kernels.CHUNK,
                BLOCK=kernels.BLOCK,
                KIND=kind,
                SCALED=scale is not None,
                ALIGNED=aligned,
                num_warps=kernels.WARPS,
            )
        kernels.reduce_chunks[(len(self.numels),)](
            table[0], self._sizes, self._firsts, self._partial, out, self._chunks, CHUNK=kernels.CHUNK, BLOCK=256
        )
        for i in odd:
            if i not in self._odd:
                self._odd[i] = PortablePass([self.numels[i]], self.device)
            self._odd[i].measure([tensors[i]], out=out[i : i + 1], scale=scale)

    def _reach(self, tensors: Sequence[Tensor | None]) -> tuple[list[Tensor | None], list[int]]:
        """Tensors a kernel can walk in a straight line, and the numbers of those that need the long way."""
        flat: list[Tensor | None] = []
        odd: list[int] = []
        for i, t in enumerate(tensors):
            if t is None:
                flat.append(None)
            elif t.layout is not torch.strided or t.dtype not in _KINDS or t.numel() != self.numels[i]:
                flat.append(None)
                odd.append(i)
            elif t.is_contiguous() or _dense(t):
                flat.append(t)
            else:
                flat.append(t.contiguous())
        return flat, odd

    def _table(self, flat: Sequence[Tensor | None]) -> tuple[Tensor, int, bool]:
        """Addresses and kinds on the device, sent only when one has changed; and the kind of all, -1 for several."""
        addresses = tuple([0 if t is None else t.data_ptr() or 16 for t in flat])  # 16: empty, but there
        kinds = tuple([0 if t is None else _KINDS[t.dtype] for t in flat])
        if self._sent is not None and self._last == (addresses, kinds):
            return self._sent
        pinned = self._pinned[self._turn % _ROTATION]
        self._turn += 1
        pinned.copy_(torch.tensor([addresses, kinds]))
        found = {kind for kind, t in zip(kinds, flat, strict=True) if t is not None}
        kind = found.pop() if len(found) == 1 else -1
        aligned = self._even and all(a % 16 == 0 for a in addresses)
        self._last = (addresses, kinds)
        self._sent = (pinned.to(self.device, non_blocking=True), kind, aligned)
        return self._sent


def _dense(tensor: Tensor) -> bool:
    """Whether a tensor that is not contiguous still fills its memory without gaps, in another order."""
    if tensor.dim() == 4:
        return tensor.is_contiguous(memory_format=torch.channels_last)
    if tensor.dim() == 5:
        return tensor.is_contiguous(memory_format=torch.channels_last_3d)
    return tensor.dim() == 2 and tensor.t().is_contiguous()
