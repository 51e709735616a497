"""References to the live state of a run, copies of it on the device or in pinned host memory, and writing them back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from surefoot.checkpoint.checksums import Checksummer, leaves
from surefoot.checkpoint.snapshot_memory import Location, PinnedPages, pinned_like
from surefoot.checkpoint.tree import TensorSlot

TensorLayout = tuple[Any, ...]
"""Shape, strides, dtype and device of a tensor, and whether only an optimizer step changes it."""
Pair = tuple[Tensor, Tensor]
"""Destination and source of a copy."""
_PLAIN_TYPES = frozenset({Tensor, nn.Parameter})
"""The types of nearly all tensors of a run: a fast path, since hundreds are collected while training waits."""
_copy_streams: dict[torch.device, torch.cuda.Stream] = {}
_EMPTY = torch.empty(0, device="cpu")


class SharedTensor(Protocol):
    """A copy of one frozen parameter that any number of snapshots refer to; it is never written again."""

    @property
    def tensor(self) -> Tensor: ...

    def matches(self, checksum: tuple[int, ...]) -> bool:
        """Whether this is the checksum of the bits that were copied."""
        ...


class LiveState:
    """References to all live state: tensors in numbered slots, and everything else without its tensors."""

    def __init__(self) -> None:
        self.local_tensors: list[Tensor] = []
        """The part of each tensor that this rank holds."""
        self.layouts: list[TensorLayout] = []
        self.shardings: dict[int, tuple[Any, ...]] = {}
        """Mesh, placements, global shape and strides of each DTensor, by slot."""
        self.rest: Any = None
        """The NonTensorState."""
        self.frozen_params: dict[int, tuple[Tensor, str]] = {}
        """Parameters that need no gradient and that no optimizer holds, with their names, by slot."""
        self.shared: dict[int, SharedTensor] = {}
        """Frozen parameters for which a shared copy is used, by slot."""
        self._slots: dict[int, tuple[TensorSlot, Tensor]] = {}

    def __contains__(self, tensor: Tensor) -> bool:
        return id(tensor) in self._slots

    def slot(self, tensor: Tensor, *, optimizer_only: bool = False) -> TensorSlot:
        """The slot of this tensor; a tensor in two places has one slot."""
        known = self._slots.get(id(tensor))
        if known is not None:
            return known[0]
        slot = TensorSlot(len(self.local_tensors))
        self._slots[id(tensor)] = slot, tensor
        if type(tensor) in _PLAIN_TYPES and tensor.layout is torch.strided:
            part = tensor.data
            strides: Any = part.stride()
        else:
            if isinstance(tensor, DTensor):
                self.shardings[slot] = sharding_of(tensor)
            part = local_part(tensor)
            strides = part.stride() if part.layout is torch.strided else part.layout
        self.local_tensors.append(part)
        self.layouts.append((part.shape, strides, part.dtype, part.device, optimizer_only))
        return slot

    def replace_tensor(self, tensor: Tensor, other: Tensor) -> None:
        """Copy `other`, of the same layout, in place of this tensor, if the tensor was collected."""
        if tensor in self:
            self.local_tensors[self._slots[id(tensor)][0]] = other

    def optimizer_slot(self, tensor: Tensor) -> TensorSlot:
        return self.slot(tensor, optimizer_only=True)

    @property
    def devices(self) -> set[torch.device]:
        """The CUDA devices that hold any of the state."""
        return {device for device in {layout[3] for layout in self.layouts} if device.type == "cuda"}

    @property
    def nbytes(self) -> dict[torch.device, int]:
        """Bytes per device that each copy takes, without shared tensors."""
        return total_bytes(part for i, part in enumerate(self.local_tensors) if i not in self.shared)

    @property
    def memory_layout(self) -> tuple[list[TensorLayout], frozenset[int]]:
        """Equal for states that can be copied into the same memory."""
        return self.layouts, frozenset(self.shared)


class StateCopy:
    """The complete state of a run at one moment; its memory can be reused for the next copy."""

    def __init__(self, location: Location = "device") -> None:
        self.location: Location = location
        self.tensors: list[Tensor] = []
        self.layouts: list[TensorLayout] = []
        self.shardings: dict[int, tuple[Any, ...]] = {}
        self.rest: Any = None
        """The NonTensorState; None while there is no complete state."""
        self.shared: dict[int, SharedTensor] = {}
        """Tensors in `tensors` that belong to other copies as well, by slot."""
        self._shared_slots: frozenset[int] = frozenset()
        """Slots without memory of their own."""
        self._copy_groups: dict[Any, list[int]] = {}
        """Slots of tensors that are copied together, by the method."""
        self._pinned_pages: list[PinnedPages] = []
        self.transfers: list[tuple[torch.device, torch.Event]] = []
        """Copies in transfer to the host: the device, and the event at the end."""

    @property
    def nbytes(self) -> int:
        """Bytes of this copy, without shared tensors."""
        return sum(tensor_bytes(t) for i, t in enumerate(self.tensors) if i not in self._shared_slots)

    def fits(self, live: LiveState) -> bool:
        """Whether memory for exactly this state is allocated."""
        return self.layouts == live.layouts and self._shared_slots == live.shared.keys()

    def release_shared(self) -> None:
        """Drop references to shared tensors, so that they can be freed; the state is incomplete afterwards."""
        if self.shared:
            self.rest = None
        for i in self.shared:
            self.tensors[i] = _EMPTY
        self.shared = {}

    def wait_on_device(self) -> None:
        """Make the device wait for a transfer to the host, before anything changes the weights again."""
        for device, event in self.transfers:
            torch.cuda.current_stream(device).wait_event(event)

    @torch.no_grad()
    def copy_from(self, live: LiveState) -> None:
        """Copy the live state into this memory."""
        self.allocate_for(live)
        self.transfers = []
        for (method, *_), slots in self._copy_groups.items():
            targets, sources = [self.tensors[i] for i in slots], [live.local_tensors[i] for i in slots]
            if method == "clone":
                for i, source in zip(slots, sources, strict=True):
                    self.tensors[i] = source.clone()
            elif method == "later":
                self.transfers.append(_copy_to_host(targets, sources))
            elif method == "now":
                for target, source in zip(targets, sources, strict=True):
                    target.copy_(source, non_blocking=True)
            else:
                torch._foreach_copy_(targets, sources)
        self.shared = dict(live.shared)
        for i, shared in self.shared.items():
            self.tensors[i] = shared.tensor
        self.shardings, self.rest = live.shardings, live.rest

    def allocate_for(self, live: LiveState) -> StateCopy:
        """Allocate memory for this state, reusing what fits; the previous content is lost."""
        self.rest = None
        if self.fits(live):
            return self
        spare: dict[TensorLayout, list[Tensor]] = defaultdict(list)
        for i, (layout, t) in enumerate(zip(self.layouts, self.tensors, strict=True)):
            if i not in self._shared_slots:
                spare[layout].append(t)
        self.tensors, self.layouts, self.shared, self._shared_slots = [], [], {}, frozenset(live.shared)
        reused = [
            _EMPTY if i in self._shared_slots else spare[layout].pop(0) if spare[layout] else None
            for i, layout in enumerate(live.layouts)
        ]
        spare.clear()  # free what fits nowhere before allocating
        missing = [source for target, source in zip(reused, live.local_tensors, strict=True) if target is None]
        allocated = iter(self._allocate(missing))
        self.tensors = [next(allocated) if target is None else target for target in reused]
        self.layouts = live.layouts
        self._copy_groups = defaultdict(list)
        for i, (target, source, layout) in enumerate(zip(self.tensors, live.local_tensors, self.layouts, strict=True)):
            if not source.is_meta and i not in self._shared_slots:
                self._copy_groups[_copy_method(target, source, optimizer_only=layout[-1])].append(i)
        return self

    def _allocate(self, sources: Sequence[Tensor]) -> list[Tensor]:
        """Memory for each of these; a tensor that is not strided is replaced when it is copied."""
        to_host = [s for s in sources if self.location == "host" and s.is_cuda and s.layout is torch.strided]
        tensors, pages = pinned_like(to_host) if to_host else ([], [])
        self._pinned_pages += pages
        pinned = dict(zip(map(id, to_host), tensors, strict=True))
        return [
            pinned[id(s)] if id(s) in pinned else torch.empty_like(s) if s.layout is torch.strided else s
            for s in sources
        ]


def _copy_method(target: Tensor, source: Tensor, *, optimizer_only: bool) -> tuple[Any, ...]:
    """How a tensor is copied; tensors with the same key are copied together."""
    if source.layout is not torch.strided or type(source) is not Tensor:
        return ("clone",)
    if target.device == source.device:
        return "beside", source.device, source.dtype, target.stride() == source.stride()
    # Other tensors are written again soon: by the next forward pass, the scaler, or the loop.
    return "later" if optimizer_only else "now", source.device


def _copy_to_host(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> tuple[torch.device, torch.Event]:
    """Copy to the host on a separate stream, after all work queued so far."""
    device = sources[0].device
    if device not in _copy_streams:
        _copy_streams[device] = torch.cuda.Stream(device)
    stream = _copy_streams[device]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source, non_blocking=True)
            source.record_stream(stream)
    return device, stream.record_event()


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part, detached from autograd; a sparse tensor's `.data` would not follow writes to it."""
    part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.data if part.layout is torch.strided else part


def sharding_of(tensor: DTensor) -> tuple[Any, ...]:
    return tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()


def total_bytes(tensors: Iterable[Tensor]) -> dict[torch.device, int]:
    """Bytes on each device."""
    sizes: dict[torch.device, int] = {}
    for tensor in tensors:
        if not tensor.is_meta:
            sizes[tensor.device] = sizes.get(tensor.device, 0) + tensor_bytes(tensor)
    return sizes


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes in memory."""
    if tensor.is_meta:
        return 0
    if tensor.layout is torch.sparse_coo:
        return tensor._indices().nbytes + tensor._values().nbytes
    return tensor.nbytes


class WriteBack:
    """Collects what to write from a copy into live tensors; writes nothing before `run`."""

    def __init__(self, copy: StateCopy) -> None:
        self._copy = copy
        self._pairs: list[Pair] = []
        self._shared_pairs: list[tuple[Pair, SharedTensor]] = []
        """Written only if the live tensor has other bits by now."""
        self._targets: dict[int, tuple[Tensor, TensorSlot]] = {}
        """Live tensors that are written, by identity: one that now serves two places cannot have two values."""
        self._restored: dict[int, Tensor] = {}
        """The tensor of each slot: a tensor shared by two places is shared again."""

    def tensor_for(self, slot: TensorSlot, live: Any) -> Tensor:
        """The tensor for this slot: the live one if it fits, otherwise a new one."""
        if slot not in self._restored:
            fits = isinstance(live, Tensor) and self.write_into(slot, live)
            self._restored[slot] = live if fits else self._new(slot)
        return self._restored[slot]

    def write_into(self, slot: TensorSlot, live: Tensor) -> bool:
        """Plan to write the slot into exactly this tensor; False if it does not fit."""
        if id(live) in self._targets:
            return self._targets[id(live)][1] == slot
        source, target = self._copy.tensors[slot], local_part(live)
        sharding = sharding_of(live) if isinstance(live, DTensor) else None
        if _shape_key(target) != _shape_key(source) or sharding != self._copy.shardings.get(slot):
            return False
        pair = (target, source)
        if target.layout is torch.strided and 0 in target.stride() and not target.is_meta:
            pair = _unexpanded(target, source)
            if pair is None:
                return False
        shared = self._copy.shared.get(slot)
        if shared is not None and target.stride() == source.stride() and leaves(target) is not None:
            self._shared_pairs.append((pair, shared))
        else:
            self._pairs.append(pair)
        self._targets[id(live)] = live, slot
        return True

    def run(self) -> None:
        """Write everything, with one launch for all tensors of a kind."""
        groups: dict[Any, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
        for target, source in (*self._pairs, *self._changed()):
            if type(target) is not Tensor or target.layout is not torch.strided or target.device != source.device:
                target.copy_(source, non_blocking=target.is_cuda)
            elif not target.is_meta:
                targets, sources = groups[target.device, target.dtype, target.stride() == source.stride()]
                targets.append(target)
                sources.append(source)
        for targets, sources in groups.values():
            torch._foreach_copy_(targets, sources)

    def _changed(self) -> list[Pair]:
        """Frozen parameters that have changed; the others, which may share memory with something, stay untouched."""
        try:
            checksums = Checksummer().measure([target for (target, _), _ in self._shared_pairs]).values()
        except RuntimeError:  # such as out of memory: better to write too much than to stop half-way
            return [pair for pair, _ in self._shared_pairs]
        return [pair for (pair, base), now in zip(self._shared_pairs, checksums, strict=True) if not base.matches(now)]

    def _new(self, slot: TensorSlot) -> Tensor:
        _, _, _, device, _ = self._copy.layouts[slot]
        new = self._copy.tensors[slot].to(device, copy=True)
        if slot not in self._copy.shardings:
            return new
        mesh, placements, shape, stride = self._copy.shardings[slot]
        return DTensor.from_local(new, mesh, placements, run_check=False, shape=shape, stride=stride)


def _shape_key(tensor: Tensor) -> tuple[Any, ...]:
    """What two tensors must have in common for one to be copied into the other."""
    exact = tensor.layout not in (torch.strided, torch.sparse_coo)
    return tensor.shape, tensor.dtype, tensor.layout, tensor._nnz() if exact else 0


def _unexpanded(target: Tensor, source: Tensor) -> Pair | None:
    """For a target with stride 0: the pair that writes each value in memory once; None if the values differ."""
    expanded = source
    for d, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if stride == 0 and size > 1:
            target, source = target.narrow(d, 0, 1), source.narrow(d, 0, 1)
    return (target, source) if torch.equal(source.expand_as(expanded), expanded) else None
