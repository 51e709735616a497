"""Per-tensor gradient statistics on CUDA: all tensors in one Triton launch, nothing waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import cast

import numpy as np
import torch
from torch import Tensor

from surefoot.measure import kernels
from surefoot.measure.stats_torch import TorchStats
from surefoot.triton_launch import Launch

_Reached = tuple[list[int], list[int], Sequence[int], Sequence[Tensor]]
_DTYPE = attrgetter("dtype")
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ROTATION = 8
"""Pinned address tables: one is rewritten only when the copy before it by this many is long over."""


class TritonStats:
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
        pinned = [torch.empty(2, len(counts), dtype=torch.int64, pin_memory=pin) for _ in range(_ROTATION)]
        self._pinned = [(each, each.numpy()) for each in pinned]
        self._written: list[list[int] | None] = [None] * _ROTATION
        """The kinds that each of them holds."""
        self._turn = 0
        self._table = torch.zeros(2, len(counts), dtype=torch.int64, device=device)
        """Address and kind of each tensor, as they were last sent."""
        self._where, self._which = self._table.unbind()
        self._sent: tuple[list[int], list[int]] | None = None
        self._kind, self._aligned = -1, False
        """Kind of all tensors, -1 for several; whether all can be read in large pieces."""
        self._odd: dict[int, TorchStats] = {}
        self._even = all(n % 8 == 0 for n in self.numels)
        self._alike = {kind: [kind] * len(counts) for kind in _KINDS.values()}
        self._measure = Launch(kernels.measure_chunks, device, num_warps=kernels.WARPS)
        self._reduce = Launch(kernels.reduce_chunks, device)

    def measure(self, tensors: Sequence[Tensor | None], *, out: Tensor, scale: Tensor | None = None) -> None:
        """Write one row of `LAYER_STATS` per tensor into `out`; `scale` divides every value first."""
        addresses, kinds, odd, _copies = self._straight(tensors) or self._reach(tensors)  # the copies live until then
        self._send(addresses, kinds)
        if self._chunks:
            self._measure.at(
                (self._kind, self._aligned, None if scale is None else (scale.data_ptr(), scale.dtype)),
                (self._chunks, 1, 1),
                self._where,
                self._sizes,
                self._which,
                self._firsts,
                self._owners,
                self._partial if scale is None else scale,
                self._partial,
                self._chunks,
                CHUNK=kernels.CHUNK,
                BLOCK=kernels.BLOCK,
                KIND=self._kind,
                SCALED=scale is not None,
                ALIGNED=self._aligned,
            )
        self._reduce.at(
            out.data_ptr(),
            (len(self.numels), 1, 1),
            self._where,
            self._sizes,
            self._firsts,
            self._partial,
            out,
            self._chunks,
            CHUNK=kernels.CHUNK,
            BLOCK=256,
        )
        for i in odd:
            if i not in self._odd:
                self._odd[i] = TorchStats([self.numels[i]], self.device)
            self._odd[i].measure([tensors[i]], out=out[i : i + 1], scale=scale)

    def _straight(self, tensors: Sequence[Tensor | None]) -> _Reached | None:
        """What `_reach` says in the common case, found quickly: all are there, alike, and lie straight."""
        given = cast(Sequence[Tensor], tensors)
        try:
            addresses = list(map(Tensor.data_ptr, given))
            kinds = self._alike[_KINDS[given[0].dtype]]
            if not all(map(Tensor.is_contiguous, given)):
                return None
            if self._sent == (addresses, kinds):  # all at the same places as before: they are of the same kind
                return addresses, kinds, (), ()
            alike = len(set(map(_DTYPE, given))) == 1 and tuple(map(Tensor.numel, given)) == self.numels
        except (TypeError, LookupError, RuntimeError):  # one is missing, of a kind of its own, or sparse
            return None
        return (addresses, kinds, (), ()) if alike and all(addresses) else None

    def _reach(self, tensors: Sequence[Tensor | None]) -> _Reached:
        """Where a kernel finds each tensor in a straight line (0: nowhere) and of which kind it is; then the numbers
        of those that need the long way, and copies made for those that do not lie straight."""
        addresses: list[int] = []
        kinds: list[int] = []
        odd: list[int] = []
        copies: list[Tensor] = []
        for t, numel in zip(tensors, self.numels, strict=True):
            if t is None:
                addresses.append(0)
                kinds.append(0)
            elif t.layout is not torch.strided or t.dtype not in _KINDS or t.numel() != numel:
                odd.append(len(addresses))
                addresses.append(0)
                kinds.append(0)
            else:
                if not t.is_contiguous() and not _dense(t):
                    t = t.contiguous()
                    copies.append(t)
                addresses.append(t.data_ptr() or 16)  # 16: empty, but there
                kinds.append(_KINDS[t.dtype])
        return addresses, kinds, odd, copies

    def _send(self, addresses: list[int], kinds: list[int]) -> None:
        """Addresses and kinds to the device, when one has changed."""
        if self._sent == (addresses, kinds):
            return
        turn = self._turn = (self._turn + 1) % _ROTATION
        pinned, view = self._pinned[turn]
        view[0] = addresses
        if self._written[turn] is not kinds:
            view[1] = self._written[turn] = kinds
        if kinds is not self._alike.get(self._kind):
            found = {kind for kind, address in zip(kinds, addresses, strict=True) if address}
            self._kind = found.pop() if len(found) == 1 else -1
        self._aligned = self._even and not int(np.bitwise_or.reduce(view[0])) % 16
        self._sent = (addresses, kinds)
        self._table.copy_(pinned, non_blocking=True)


def _dense(tensor: Tensor) -> bool:
    """Whether a tensor that is not contiguous still fills its memory without gaps, in another order."""
    if tensor.dim() == 4:
        return tensor.is_contiguous(memory_format=torch.channels_last)
    if tensor.dim() == 5:
        return tensor.is_contiguous(memory_format=torch.channels_last_3d)
    return tensor.dim() == 2 and tensor.t().is_contiguous()
