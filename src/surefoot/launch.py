"""Launches Triton kernels without looking at every argument anew: on a small model that look is half the cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Launch:
    """One kernel on one device; compiled by Triton on the first call with arguments of a kind, then launched directly.

    Arguments come in the order of the kernel's signature, its constants by keyword and in that order too.
    """

    def __init__(self, kernel: Any, device: torch.device, *, num_warps: int = 4) -> None:
        self._kernel = kernel
        self._index = device.index
        """Which accelerator; None where the kernels are interpreted."""
        self._warps = num_warps
        self._known: dict[tuple[Any, ...], Callable[..., None]] = {}

    def __call__(self, grid: tuple[int, int, int], *args: Tensor | int, **constants: bool | int) -> None:
        if self._index is not None and torch.cuda.current_device() != self._index:
            with torch.cuda.device(self._index):  # Triton launches on the current device, whatever the tensors say
                self(grid, *args, **constants)
            return
        # All that Triton compiles for: kinds and alignment of tensors, and the values of whole numbers.
        kinds = [a if isinstance(a, int) else (a.dtype, a.data_ptr() % 16) for a in args]
        key = (grid, *kinds, *constants.values())
        known = self._known.get(key)
        if known is not None:
            known(*args, *constants.values(), stream=torch._C._cuda_getCurrentRawStream(self._index))
            return
        compiled = self._kernel[grid](*args, **constants, num_warps=self._warps)
        if compiled is not None:  # the interpreter has nothing to keep
            self._known[key] = compiled[grid]
