"""The way back: live tensors are written where they lie."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from surefoot.checkpoint.checksums import Checksums, leaves
from surefoot.checkpoint.copies import Copy, SharedTensor, local_storage, spread_of
from surefoot.checkpoint.tree import Slot

Pair = tuple[Tensor, Tensor]
"""Where to, and what."""


class Return:
    """Collects what is to be written from one copy; nothing is, before `write`."""

    def __init__(self, copy: Copy) -> None:
        self._copy = copy
        self._pairs: list[Pair] = []
        self._frozen: list[tuple[Pair, SharedTensor]] = []
        """What is only written where the live tensor has other bits by now."""
        self._written: dict[int, tuple[Tensor, Slot]] = {}
        """Live tensors that get a value, by identity: one that now serves two places cannot have two."""
        self._became: dict[int, Tensor] = {}
        """What each slot has become: a tensor shared by two places is shared again."""

    def tensor(self, slot: Slot, live: Any) -> Tensor:
        """The tensor for this slot: the live one where it fits, else a new one."""
        if slot not in self._became:
            fits = isinstance(live, Tensor) and self.into(slot, live)
            self._became[slot] = live if fits else self._new(slot)
        return self._became[slot]

    def into(self, slot: Slot, live: Tensor) -> bool:
        """Have exactly this tensor written; False where it does not fit."""
        if id(live) in self._written:
            return self._written[id(live)][1] == slot
        saved, to = self._copy.tensors[slot], local_storage(live)
        spread = spread_of(live) if isinstance(live, DTensor) else None
        if _form(to) != _form(saved) or spread != self._copy.spreads.get(slot):
            return False
        pair = (to, saved)
        if to.layout is torch.strided and 0 in to.stride() and not to.is_meta:
            pair = _unexpanded(to, saved)
            if pair is None:
                return False
        shared = self._copy.shared.get(slot)
        if shared is not None and to.stride() == saved.stride() and leaves(to) is not None:
            self._frozen.append((pair, shared))
        else:
            self._pairs.append(pair)
        self._written[id(live)] = live, slot
        return True

    def write(self) -> None:
        """Write everything, in one launch for all that are alike."""
        groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        for to, of in (*self._pairs, *self._changed()):
            if type(to) is not Tensor or to.layout is not torch.strided or to.device != of.device:
                to.copy_(of, non_blocking=to.is_cuda)
            elif not to.is_meta:
                tos, ofs = groups[to.device, to.dtype, to.stride() == of.stride()]
                tos.append(to)
                ofs.append(of)
        for tos, ofs in groups.values():
            torch._foreach_copy_(tos, ofs)

    def _changed(self) -> list[Pair]:
        """Of the frozen parameters those that are not what they were; others that share their memory stay untouched."""
        try:
            checksums = Checksums().measure([to for (to, _), _ in self._frozen]).values()
        except RuntimeError:  # such as no memory: better to write too much than to stop half-way
            return [pair for pair, _ in self._frozen]
        return [pair for (pair, base), now in zip(self._frozen, checksums, strict=True) if not base.matches(now)]

    def _new(self, slot: Slot) -> Tensor:
        _, _, _, device, _ = self._copy.kinds[slot]
        new = self._copy.tensors[slot].to(device, copy=True)
        if slot not in self._copy.spreads:
            return new
        mesh, placements, shape, stride = self._copy.spreads[slot]
        return DTensor.from_local(new, mesh, placements, run_check=False, shape=shape, stride=stride)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    """What two tensors must have in common for one to be written into the other."""
    exact = tensor.layout not in (torch.strided, torch.sparse_coo)
    return tensor.shape, tensor.dtype, tensor.layout, tensor._nnz() if exact else 0


def _unexpanded(to: Tensor, saved: Tensor) -> Pair | None:
    """One value in memory stands for many: write it once, if those saved are alike."""
    whole = saved
    for d, (size, stride) in enumerate(zip(to.shape, to.stride(), strict=True)):
        if stride == 0 and size > 1:
            to, saved = to.narrow(d, 0, 1), saved.narrow(d, 0, 1)
    return (to, saved) if torch.equal(saved.expand_as(whole), whole) else None
