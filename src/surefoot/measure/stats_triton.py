"""Per-tensor statistics and their summary on CUDA: all tensors in one Triton launch, without a wait."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import cast

import numpy as np
import torch
from torch import Tensor

from surefoot.measure import stats_kernels
from surefoot.measure.stats_torch import Summariser, TorchStats
from surefoot.triton_launch import KernelLauncher

_Located = tuple[list[int], list[int], Sequence[int], Sequence[Tensor]]
"""Address and kind of each tensor, the indices that need TorchStats, and contiguous copies to keep alive."""
_DTYPE = attrgetter("dtype")
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ROTATION = 8
"""Number of pinned address tables: one is rewritten only this many copies later, when its copy is long over."""


class TritonStats:
    """Measures a list of tensors into one row each; same numbers and same signature as `TorchStats`."""

    def __init__(self, numels: Sequence[int], device: torch.device) -> None:
        self.numels = tuple(numels)
        self.device = device
        counts = [-(-n // stats_kernels.CHUNK) for n in self.numels]
        self._chunks = sum(counts)
        firsts = torch.tensor([0, *counts], dtype=torch.int64).cumsum(0).to(torch.int32)
        owners = torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), torch.tensor(counts))
        self._firsts = firsts.to(device)
        self._owners = owners.to(device)
        self._sizes = torch.tensor(self.numels, dtype=torch.int64).to(device)
        self._partial = torch.zeros(7 * max(self._chunks, 1), device=device)
        pin = device.type == "cuda"
        pinned = [torch.empty(2, len(counts), dtype=torch.int64, pin_memory=pin) for _ in range(_ROTATION)]
        self._pinned = [(table, table.numpy()) for table in pinned]
        self._written: list[list[int] | None] = [None] * _ROTATION
        """The kinds in each pinned table."""
        self._current = 0
        self._table = torch.zeros(2, len(counts), dtype=torch.int64, device=device)
        """Address and kind of each tensor, as they were last sent."""
        self._addresses, self._kinds = self._table.unbind()
        self._sent: tuple[list[int], list[int]] | None = None
        self._kind, self._aligned = -1, False
        """Kind of all tensors, -1 when they differ; whether all can be read 16 bytes at a time."""
        self._fallbacks: dict[int, TorchStats] = {}
        self._multiples_of_8 = all(n % 8 == 0 for n in self.numels)
        self._uniform_kinds = {kind: [kind] * len(counts) for kind in _KINDS.values()}
        self._measure = KernelLauncher(stats_kernels.measure_chunks, device, num_warps=stats_kernels.WARPS)
        self._reduce = KernelLauncher(stats_kernels.reduce_chunks, device)

    def measure(self, tensors: Sequence[Tensor | None], *, out: Tensor, scale: Tensor | None = None) -> None:
        """Write one row of `LAYER_STATS` per tensor into `out`; `scale` divides every value first."""
        # `_copies` stay alive until the kernels are launched.
        addresses, kinds, fallback, _copies = self._locate_uniform(tensors) or self._locate(tensors)
        self._send(addresses, kinds)
        if self._chunks:
            self._measure.launch_cached(
                (self._kind, self._aligned, None if scale is None else (scale.data_ptr(), scale.dtype)),
                (self._chunks, 1, 1),
                self._addresses,
                self._sizes,
                self._kinds,
                self._firsts,
                self._owners,
                self._partial if scale is None else scale,
                self._partial,
                self._chunks,
                CHUNK=stats_kernels.CHUNK,
                BLOCK=stats_kernels.BLOCK,
                KIND=self._kind,
                SCALED=scale is not None,
                ALIGNED=self._aligned,
            )
        self._reduce.launch_cached(
            out.data_ptr(),
            (len(self.numels), 1, 1),
            self._addresses,
            self._sizes,
            self._firsts,
            self._partial,
            out,
            self._chunks,
            CHUNK=stats_kernels.CHUNK,
            BLOCK=256,
        )
        for i in fallback:
            if i not in self._fallbacks:
                self._fallbacks[i] = TorchStats([self.numels[i]], self.device)
            self._fallbacks[i].measure([tensors[i]], out=out[i : i + 1], scale=scale)

    def _locate_uniform(self, tensors: Sequence[Tensor | None]) -> _Located | None:
        """The fast path of `_locate`: all tensors present, of one dtype, and contiguous; None when they are not."""
        dense = cast(Sequence[Tensor], tensors)
        try:
            addresses = list(map(Tensor.data_ptr, dense))
            kinds = self._uniform_kinds[_KINDS[dense[0].dtype]]
            if not all(map(Tensor.is_contiguous, dense)):
                return None
            if self._sent == (addresses, kinds):  # unchanged addresses and first dtype: the same tensors
                return addresses, kinds, (), ()
            uniform = len(set(map(_DTYPE, dense))) == 1 and tuple(map(Tensor.numel, dense)) == self.numels
        except (TypeError, LookupError, RuntimeError):  # one is missing, of another dtype, or sparse
            return None
        return (addresses, kinds, (), ()) if uniform and all(addresses) else None

    def _locate(self, tensors: Sequence[Tensor | None]) -> _Located:
        """Locate each tensor in dense memory; address 0 marks one that is absent or measured by `TorchStats`."""
        addresses: list[int] = []
        kinds: list[int] = []
        fallback: list[int] = []
        copies: list[Tensor] = []
        for t, numel in zip(tensors, self.numels, strict=True):
            if t is None:
                addresses.append(0)
                kinds.append(0)
            elif t.layout is not torch.strided or t.dtype not in _KINDS or t.numel() != numel:
                fallback.append(len(addresses))
                addresses.append(0)
                kinds.append(0)
            else:
                if not t.is_contiguous() and not _fills_memory(t):
                    t = t.contiguous()
                    copies.append(t)
                addresses.append(t.data_ptr() or 16)  # 16: an empty tensor, not an absent one
                kinds.append(_KINDS[t.dtype])
        return addresses, kinds, fallback, copies

    def _send(self, addresses: list[int], kinds: list[int]) -> None:
        """Copy addresses and kinds to the device, if they have changed."""
        if self._sent == (addresses, kinds):
            return
        current = self._current = (self._current + 1) % _ROTATION
        pinned, view = self._pinned[current]
        view[0] = addresses
        if self._written[current] is not kinds:
            view[1] = self._written[current] = kinds
        if kinds is not self._uniform_kinds.get(self._kind):
            present = {kind for kind, address in zip(kinds, addresses, strict=True) if address}
            self._kind = present.pop() if len(present) == 1 else -1
        self._aligned = self._multiples_of_8 and not int(np.bitwise_or.reduce(view[0])) % 16
        self._sent = (addresses, kinds)
        self._table.copy_(pinned, non_blocking=True)


def _fills_memory(tensor: Tensor) -> bool:
    """Whether a non-contiguous tensor still fills its memory without gaps, in another order."""
    if tensor.dim() == 4:
        return tensor.is_contiguous(memory_format=torch.channels_last)
    if tensor.dim() == 5:
        return tensor.is_contiguous(memory_format=torch.channels_last_3d)
    return tensor.dim() == 2 and tensor.t().is_contiguous()


def triton_summariser(units: Sequence[slice], device: torch.device) -> Summariser:
    """The summariser in one Triton launch."""
    launcher = KernelLauncher(stats_kernels.summarise, device)
    spans = torch.tensor([[s.start, s.stop] for s in units], dtype=torch.int32, device=device)
    unused = torch.zeros((), device=device)

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
        loss_key = None if loss is None else (loss.data_ptr(), loss.dtype)
        weight_key = None if weight is None else weight.data_ptr()
        launcher.launch_cached(
            (
                loss_key,
                weight_key,
                stats.data_ptr(),
                summary.data_ptr(),
                microbatches.data_ptr(),
                owned.data_ptr(),
                microbatch,
            ),
            (1, 1, 1),
            stats,
            owned,
            spans,
            len(units),
            unused if loss is None else loss,
            unused if weight is None else weight,
            summary,
            microbatches,
            microbatch,
            HAS_LOSS=loss is not None,
            HAS_WEIGHT=weight is not None,
            BLOCK=256,
        )

    return summarise
