"""What was found of a run, and copies of it beside the originals or in pinned host memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from surefoot.checkpoint.pinned import Pages, pinned_like
from surefoot.checkpoint.snapshot_memory import Home
from surefoot.checkpoint.tree import Slot

Kind = tuple[Any, ...]
"""Shape, strides, type and device of a tensor, and whether it is steady: changed by an optimizer's step alone."""
_USUAL = frozenset({Tensor, nn.Parameter})
"""What nearly all tensors of a run are: found by the hundred while training waits, without the questions."""
_sides: dict[torch.device, torch.cuda.Stream] = {}
_NOTHING = torch.empty(0, device="cpu")


class SharedTensor(Protocol):
    """A copy of one frozen parameter to which any number of snapshots refer; it is never written again."""

    @property
    def tensor(self) -> Tensor: ...

    def matches(self, checksum: tuple[int, ...]) -> bool:
        """Whether these are the bits that were copied."""
        ...


class Look:
    """All that was found: live tensors in numbered slots, and the rest, frozen."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []
        """Of each tensor the part that this process holds."""
        self.kinds: list[Kind] = []
        self.spreads: dict[int, tuple[Any, ...]] = {}
        """Of each DTensor: how it is spread over the processes, and its whole shape."""
        self.frozen: Any = None
        self.frozen_params: dict[int, tuple[Tensor, str]] = {}
        """Parameters that need no gradient and that no optimizer holds, with their names, by slot."""
        self.shared: dict[int, SharedTensor] = {}
        """Those of them of which a copy that others refer to as well serves, by slot."""
        self._slots: dict[int, tuple[Slot, Tensor]] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._slots

    def slot(self, tensor: Tensor, *, steady: bool = False) -> Slot:
        """The slot of this tensor; one tensor in two places has one slot."""
        known = self._slots.get(id(tensor))
        if known is not None:
            return known[0]
        slot = Slot(len(self.parts))
        self._slots[id(tensor)] = slot, tensor
        if type(tensor) in _USUAL and tensor.layout is torch.strided:
            part = tensor.data
            strides: Any = part.stride()
        else:
            if isinstance(tensor, DTensor):
                self.spreads[slot] = spread_of(tensor)
            part = local_storage(tensor)
            strides = part.stride() if part.layout is torch.strided else part.layout
        self.parts.append(part)
        self.kinds.append((part.shape, strides, part.dtype, part.device, steady))
        return slot

    def instead(self, tensor: Tensor, other: Tensor) -> None:
        """Copy another in this tensor's place, if it was found: one that is alike, and as it was earlier."""
        if tensor in self:
            self.parts[self._slots[id(tensor)][0]] = other

    def steady_slot(self, tensor: Tensor) -> Slot:
        return self.slot(tensor, steady=True)

    @property
    def devices(self) -> set[torch.device]:
        """The accelerators on which something was found."""
        return {device for device in {kind[3] for kind in self.kinds} if device.type == "cuda"}

    @property
    def nbytes(self) -> dict[torch.device, int]:
        """Bytes on each device that every copy takes; what copies share is not among them."""
        return total_bytes(part for i, part in enumerate(self.parts) if i not in self.shared)

    @property
    def layout(self) -> tuple[list[Kind], frozenset[int]]:
        """What copies with the same memory have in common."""
        return self.kinds, frozenset(self.shared)


class Copy:
    """Everything a run consisted of at one moment; its memory serves the next one that is taken into it."""

    def __init__(self, home: Home = "device") -> None:
        self.home: Home = home
        self.tensors: list[Tensor] = []
        self.kinds: list[Kind] = []
        self.spreads: dict[int, tuple[Any, ...]] = {}
        self.frozen: Any = None
        """All that is no tensor; nothing while there is no whole state in here."""
        self.shared: dict[int, SharedTensor] = {}
        """What stands in `tensors` but belongs to other copies as well, by slot."""
        self._referring: frozenset[int] = frozenset()
        """Slots for which there is no memory in here."""
        self._batches: dict[Any, list[int]] = {}
        """Tensors that are copied together, by the way they go."""
        self._pages: list[Pages] = []
        """What copies on the host lie on."""
        self.arrivals: list[tuple[torch.device, torch.Event]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of its own, without those that are shared."""
        return sum(bytes_of(t) for i, t in enumerate(self.tensors) if i not in self._referring)

    def fits(self, look: Look) -> bool:
        """Whether there is memory for exactly this."""
        return self.kinds == look.kinds and self._referring == look.shared.keys()

    def release_shared(self) -> None:
        """Refer to no shared tensor any more, so that its memory can go; there is no whole state in here then."""
        if self.shared:
            self.frozen = None
        for i in self.shared:
            self.tensors[i] = _NOTHING
        self.shared = {}

    def settle(self) -> None:
        """Let the device wait for a copy on its way to the host: due before anything changes the weights again."""
        for device, event in self.arrivals:
            torch.cuda.current_stream(device).wait_event(event)

    @torch.no_grad()
    def store(self, look: Look) -> None:
        """Copy what was found."""
        self.make_room(look)
        self.arrivals = []
        for (way, *_), numbers in self._batches.items():
            tos, ofs = [self.tensors[i] for i in numbers], [look.parts[i] for i in numbers]
            if way == "clone":
                for i, of in zip(numbers, ofs, strict=True):
                    self.tensors[i] = of.clone()
            elif way == "later":
                self.arrivals.append(_send(tos, ofs))
            elif way == "now":
                for to, of in zip(tos, ofs, strict=True):
                    to.copy_(of, non_blocking=True)
            else:
                torch._foreach_copy_(tos, ofs)
        self.shared = dict(look.shared)
        for i, shared in self.shared.items():
            self.tensors[i] = shared.tensor
        self.spreads, self.frozen = look.spreads, look.frozen

    def make_room(self, look: Look) -> Copy:
        """Have memory for what was found; whatever was in here is lost."""
        self.frozen = None
        if self.fits(look):
            return self
        spare: dict[Kind, list[Tensor]] = defaultdict(list)
        for i, (kind, t) in enumerate(zip(self.kinds, self.tensors, strict=True)):
            if i not in self._referring:
                spare[kind].append(t)
        self.tensors, self.kinds, self.shared, self._referring = [], [], {}, frozenset(look.shared)
        found = [
            _NOTHING if i in self._referring else spare[kind].pop(0) if spare[kind] else None
            for i, kind in enumerate(look.kinds)
        ]
        spare.clear()  # what fits nowhere goes before anything new is asked for
        rooms = iter(self._rooms([of for to, of in zip(found, look.parts, strict=True) if to is None]))
        self.tensors = [next(rooms) if to is None else to for to in found]
        self.kinds = look.kinds
        self._batches = defaultdict(list)
        for i, (to, of, kind) in enumerate(zip(self.tensors, look.parts, self.kinds, strict=True)):
            if not of.is_meta and i not in self._referring:
                self._batches[_way(to, of, steady=kind[-1])].append(i)
        return self

    def _rooms(self, new: Sequence[Tensor]) -> list[Tensor]:
        """Memory for each of these; one that is not strided is replaced as a whole when it is copied."""
        away = [of for of in new if self.home == "host" and of.is_cuda and of.layout is torch.strided]
        pinned, pages = pinned_like(away)
        self._pages += pages
        far = dict(zip(map(id, away), pinned, strict=True))
        return [
            far[id(of)] if id(of) in far else torch.empty_like(of) if of.layout is torch.strided else of for of in new
        ]


def _way(to: Tensor, of: Tensor, *, steady: bool) -> tuple[Any, ...]:
    """How a tensor is copied; those with the same answer go together, fast when they are alike."""
    if of.layout is not torch.strided or type(of) is not Tensor:
        return ("clone",)
    if to.device == of.device:
        return "beside", of.device, of.dtype, to.stride() == of.stride()
    # What is not steady is soon written again: by the next forward, the scaler, or the loop.
    return "later" if steady else "now", of.device


def _send(tos: Sequence[Tensor], ofs: Sequence[Tensor]) -> tuple[torch.device, torch.Event]:
    """Copy to the host on a stream of its own, behind all work queued so far."""
    device = ofs[0].device
    if device not in _sides:
        _sides[device] = torch.cuda.Stream(device)
    side = _sides[device]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for to, of in zip(tos, ofs, strict=True):
            to.copy_(of, non_blocking=True)
            of.record_stream(side)
    return device, side.record_event()


def local_storage(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory and hidden from autograd.

    Unlike `measure.layout.to_local` it never reduces a partial DTensor: a copy could not be written back. A sparse
    tensor is returned itself, because its `.data` would not follow what is written to it.
    """
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.data if part.layout is torch.strided else part


def spread_of(tensor: DTensor) -> tuple[Any, ...]:
    return tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()


def total_bytes(tensors: Iterable[Tensor]) -> dict[torch.device, int]:
    """Bytes held on each device."""
    sizes: dict[torch.device, int] = {}
    for tensor in tensors:
        if not tensor.is_meta:
            sizes[tensor.device] = sizes.get(tensor.device, 0) + bytes_of(tensor)
    return sizes


def bytes_of(tensor: Tensor) -> int:
    """Bytes held in memory."""
    if tensor.is_meta:
        return 0
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes
