"""Checksums of the bits of tensors in place: xxh3 on the host; on a device, one launch without synchronisation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._triton import has_triton

from surefoot.triton_launch import KernelLauncher

POSITION, FIRST, SECOND = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB
"""Odd, so that multiplication by them is invertible."""
PROGRAMS = 256
"""Programs that share the words of one tensor."""
_CHUNK = {"cpu": 1 << 16}
_DEVICE_CHUNK = 1 << 24
"""Words mixed at a time where there is no kernel, to bound the memory for intermediate results."""

Checksum = tuple[int, ...]
"""One number for each plain tensor that a tensor is made of."""


def leaves(tensor: Tensor) -> list[Tensor] | None:
    """The plain tensors that a tensor is made of; None if their bits cannot be read."""
    if type(tensor) is Tensor or not is_traceable_wrapper_subclass(tensor):
        dense = tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized
        return [tensor] if type(tensor) is Tensor and dense and 0 not in tensor.stride() else None
    names, _ = tensor.__tensor_flatten__()  # pyright: ignore[reportAttributeAccessIssue]
    parts = [leaves(getattr(tensor, name).detach()) for name in names]
    return None if any(part is None for part in parts) else [leaf for part in parts for leaf in part or ()]


class PendingChecksums:
    """Checksums that a device may still be computing."""

    def __init__(self, counts: Sequence[int]) -> None:
        self._counts = counts
        """How many plain tensors each tensor is made of."""
        self._numbers: list[int] = [0] * sum(counts)
        self._pending: list[tuple[list[int], Tensor, Any]] = []
        self._values: list[Checksum] | None = None

    def add_device(self, places: list[int], sums: Tensor) -> None:
        """Start the transfer of these sums to the host, without waiting."""
        if not sums.is_cuda:
            self._pending.append((places, sums, None))
            return
        host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True).copy_(sums, non_blocking=True)
        self._pending.append((places, host, torch.cuda.current_stream(sums.device).record_event()))

    def set_host(self, place: int, number: int) -> None:
        self._numbers[place] = number

    @property
    def ready(self) -> bool:
        """Whether all have arrived; does not wait."""
        return all(event is None or event.query() for _, _, event in self._pending)

    def values(self) -> list[Checksum]:
        """All checksums; waits if necessary."""
        if self._values is not None:
            return self._values
        for places, sums, event in self._pending:
            if event is not None and not event.query():
                event.synchronize()
            for place, number in zip(places, sums.tolist(), strict=True):
                self._numbers[place] = number
        self._pending.clear()
        numbers = iter(self._numbers)
        self._values = [tuple(next(numbers) for _ in range(count)) for count in self._counts]
        return self._values


class Checksummer:
    """Computes checksums of tensors that mostly stay in place, such as frozen parameters."""

    def __init__(self) -> None:
        self._launches: dict[torch.device, KernelLauncher] = {}
        self._tables: dict[tuple[int, ...], Tensor] = {}

    @torch.no_grad()
    def measure(self, tensors: Sequence[Tensor]) -> PendingChecksums:
        """Checksums of the current bits; `leaves` must not be None for any of these."""
        parts = [leaves(tensor) or [] for tensor in tensors]
        flat = [_in_memory_order(leaf) for part in parts for leaf in part]
        pending = PendingChecksums([len(part) for part in parts])
        by_device: dict[torch.device, list[int]] = {}
        for place, leaf in enumerate(flat):
            if leaf.device.type == "cpu":
                pending.set_host(place, xxhash.xxh3_64_intdigest(leaf.view(torch.uint8).numpy().data))
            else:
                by_device.setdefault(leaf.device, []).append(place)
        for device, places in by_device.items():
            pending.add_device(places, self._on_device([flat[i] for i in places], device))
        return pending

    def _on_device(self, flat: Sequence[Tensor], device: torch.device) -> Tensor:
        sums = torch.zeros(len(flat), dtype=torch.int64, device=device)
        fused = [device.type == "cuda" and has_triton() and _is_aligned(t) for t in flat]
        together = [i for i, fits in enumerate(fused) if fits]
        if together:
            self._launch([flat[i] for i in together], together, sums)
        for i, fits in enumerate(fused):
            if not fits:
                sums[i] = portable_checksum(flat[i])
        return sums

    def _launch(self, flat: Sequence[Tensor], places: Sequence[int], sums: Tensor) -> None:
        device = sums.device
        if device not in self._launches:
            from surefoot.checkpoint.buffer_kernels import checksum_words

            self._launches[device] = KernelLauncher(checksum_words, device)
        key = (device.index or 0, *[t.data_ptr() for t in flat], *[t.nbytes // 8 for t in flat], *places)
        if key not in self._tables:
            if len(self._tables) > 8:
                self._tables.clear()
            table = torch.tensor(key[1:], dtype=torch.int64, pin_memory=True)
            self._tables[key] = table.to(device, non_blocking=True)
        constants = {"POSITION": POSITION, "FIRST": FIRST, "SECOND": SECOND, "BLOCK": 1024}
        self._launches[device]((len(flat), PROGRAMS, 1), self._tables[key], sums, len(flat), **constants)


def portable_checksum(flat: Tensor) -> Tensor:
    """The same checksum without the kernel: every word is mixed with its position, and all are summed."""
    words = _words(flat)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    step = _CHUNK.get(flat.device.type, _DEVICE_CHUNK)
    for start in range(0, words.numel(), step):
        chunk = words[start : start + step]
        mixed = (chunk + torch.arange(start, start + chunk.numel(), device=flat.device) * POSITION) * FIRST
        mixed = (mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)) * SECOND
        total += (mixed ^ ((mixed >> 32) & 0xFFFFFFFF)).sum()
    return total


def _in_memory_order(tensor: Tensor) -> Tensor:
    """The values in one dimension; without a copy if the tensor has no gaps."""
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    if not tensor.is_contiguous() and torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return tensor.as_strided((tensor.numel(),), (1,))
    return tensor.contiguous().view(-1)


def _is_aligned(flat: Tensor) -> bool:
    return flat.nbytes % 8 == 0 and flat.data_ptr() % 8 == 0


def _words(flat: Tensor) -> Tensor:
    """The bits as 64-bit words; the last word is padded with zeros."""
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    octets = flat.view(torch.uint8)
    rest = octets.numel() % 8
    if rest:
        octets = torch.cat([octets, octets.new_zeros(8 - rest)])
    return octets.view(torch.int64)
