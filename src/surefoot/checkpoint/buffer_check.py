"""Finds buffers that a batch has made non-finite, on the device, before its update is decided on."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._triton import has_triton

from surefoot.checkpoint.buffers import BufferShadow, FloatPair
from surefoot.triton_launch import KernelLauncher

_BITS = {
    torch.float16: (2, 0x7C00, -(1 << 10)),
    torch.bfloat16: (2, 0x7F80, -(1 << 7)),
    torch.float32: (4, 0x7F80_0000, -(1 << 23)),
    torch.float64: (8, 0x7FF0_0000_0000_0000, -(1 << 52)),
}
"""Bytes of a value, the bits that are all set when it is infinite or NaN, and -inf as a whole number."""
REPEATS = 3
"""Refusals in a row for one buffer, with finite loss and gradients, after which its non-finite values are intended."""


class BufferCheck:
    """Counts values that are finite in the shadow of the buffers and not in the buffers themselves.

    What was non-finite before is never counted, nor is a buffer that has another shape now. Outside of normalisation
    layers -inf is a value like others: masks are made of it.
    """

    def __init__(self, shadow: BufferShadow | None, counts: Tensor, total: Tensor) -> None:
        self.names: tuple[str, ...] = () if shadow is None else shadow.names
        self._shadow = shadow
        self._counts, self._total = counts, total
        self._launch: KernelLauncher | None = None
        self._key: list[tuple[Any, ...]] = []
        self._table = counts
        self._begun = False
        self._repeats: dict[int, int] = {}
        self._attempt = -1
        self._exempt: set[int] = set()
        self._told: list[str] = []

    def begin(self) -> None:
        """The next count is the first of another update."""
        self._begun = False

    @property
    def begun(self) -> bool:
        """Whether the buffers were counted for the update under way."""
        return self._begun

    @torch.no_grad()
    def count(self) -> None:
        """Add what is found now to what was found since `begin`; never waits for an accelerator."""
        if self._shadow is None or not self.names:
            return
        if not self._begun:
            torch._foreach_zero_([self._counts, self._total])
            self._begun = True
        pairs = [pair for pair in self._shadow.float_pairs() if pair.number not in self._exempt]
        together = [pair for pair in pairs if self._reaches(pair)]
        if together:
            self._count_fused(together)
        for pair in pairs if not together else [pair for pair in pairs if not self._reaches(pair)]:
            self._count_one(pair)

    def found(self) -> bool:
        """Count once more, and whether anything was found since `begin`; waits for the device."""
        self.count()
        return bool(self.names) and bool(self._total > 0)

    def _reaches(self, pair: FloatPair) -> bool:
        """Whether the kernel can read this buffer where it lies."""
        here = self._counts.device
        return (
            pair.live.device == pair.kept.device == here
            and here.type == "cuda"
            and has_triton()
            and pair.live.is_contiguous()
            and pair.kept.is_contiguous()
        )

    def _count_fused(self, pairs: list[FloatPair]) -> None:
        """All buffers in one launch."""
        from surefoot.checkpoint.kernels import count_nonfinite

        if self._launch is None:
            self._launch = KernelLauncher(count_nonfinite, self._counts.device)
        key = [(p.number, p.live.data_ptr(), p.kept.data_ptr(), p.live.numel(), p.live.dtype) for p in pairs]
        if key != self._key:
            self._key, self._table = key, table_of(pairs, self._counts.device)
        self._launch((len(pairs), 16, 1), self._table, self._counts, self._total, len(pairs), BLOCK=1024)

    def _count_one(self, pair: FloatPair) -> None:
        if pair.live.numel() == 0:
            return
        if pair.live.device.type == "cpu":  # nothing to wait for: most often one look is enough
            largest = torch.linalg.vector_norm(pair.live, math.inf).item()
            if math.isfinite(largest):
                return
        bad = ~pair.live.isfinite() & pair.kept.isfinite()
        bad = (bad if pair.of_norm else bad & (pair.live != -math.inf)).sum()
        bad = bad.to(self._counts.device, self._counts.dtype, non_blocking=True)
        self._counts[pair.number] += bad
        self._total += bad

    # -- two steps later, on the host

    def follow(self, attempt: int, bad: list[int], *, alone: bool, landed: bool) -> None:
        """Learn which buffers are non-finite on purpose: a bound of inf that is set only once the model runs.

        `bad` became non-finite in this attempt, and `alone` says that nothing else was wrong. Statistics of
        normalisation layers are never meant to be non-finite.
        """
        if self._shadow is None or attempt == self._attempt:
            return
        self._attempt = attempt
        if landed:
            self._repeats.clear()
        if not alone:
            return
        for number in bad:
            self._repeats[number] = self._repeats.get(number, 0) + 1
            if self._repeats[number] >= REPEATS and number not in self._exempt and not self._shadow.of_norm[number]:
                self._exempt.add(number)
                self._told.append(self.names[number])

    def exempted(self) -> list[str]:
        """Buffers that are not checked any more, each named once."""
        told, self._told = self._told, []
        return told


def table_of(pairs: list[FloatPair], device: torch.device) -> Tensor:
    """What the kernel reads: addresses, number of values, how to tell those that are bad, and whose count it is."""
    bits = [_BITS[pair.live.dtype] for pair in pairs]
    columns = (
        [pair.live.data_ptr() for pair in pairs],
        [pair.kept.data_ptr() for pair in pairs],
        [pair.live.numel() for pair in pairs],
        [width for width, _, _ in bits],
        [exponent for _, exponent, _ in bits],
        [0 if pair.of_norm else least for pair, (_, _, least) in zip(pairs, bits, strict=True)],
        [pair.number for pair in pairs],
    )
    return torch.tensor([value for column in columns for value in column], dtype=torch.int64, device=device)
