"""Launches Triton kernels without looking at every argument anew: on a small model that look is half the cost."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

PLACES = 256
"""Launches that are kept ready: what does not stay where it is comes to lie at a few places in turn."""


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
        self._ready: dict[Hashable, tuple[Callable[..., None], tuple[int, ...]]] = {}

    def __call__(self, grid: tuple[int, int, int], *args: Tensor | int, **constants: bool | int) -> None:
        self._launch(grid, args, constants)

    def at(self, key: Hashable, grid: tuple[int, int, int], *args: Tensor | int, **constants: bool | int) -> None:
        """Launch as the last time with this key, which must tell everything that may have changed since.

        That is where those tensors lie that do not stay where they are, and what else differs from call to call.
        """
        known = self._ready.get(key)
        if known is not None and torch._C._cuda_getDevice() == self._index:
            launch, given = known
            launch(*given, stream=torch._C._cuda_getCurrentRawStream(self._index))
            return
        launch = self._launch(grid, args, constants)
        if launch is not None:
            if len(self._ready) >= PLACES:
                self._ready.clear()
            # By address: Triton asks the driver about every tensor, and this keeps none alive.
            places = [a if isinstance(a, int) else a.data_ptr() for a in args]
            self._ready[key] = launch, (*places, *constants.values())

    def _launch(
        self, grid: tuple[int, int, int], args: tuple[Tensor | int, ...], constants: dict[str, bool | int]
    ) -> Callable[..., None] | None:
        if self._index is not None and torch.cuda.current_device() != self._index:
            with torch.cuda.device(self._index):  # Triton launches on the current device, whatever the tensors say
                return self._launch(grid, args, constants)
        # All that Triton compiles for: kinds and alignment of tensors, and the values of whole numbers.
        kinds = [a if isinstance(a, int) else (a.dtype, a.data_ptr() % 16) for a in args]
        key = (grid, *kinds, *constants.values())
        known = self._known.get(key)
        if known is not None:
            known(*args, *constants.values(), stream=torch._C._cuda_getCurrentRawStream(self._index))
            return known
        compiled = self._kernel[grid](*args, **constants, num_warps=self._warps)
        if compiled is not None:  # the interpreter has nothing to keep
            self._known[key] = compiled[grid]
        return self._known.get(key)
