"""The measured block: what its slots mean, where its parts lie on the device, and how it gets to the host.

All numbers of one step lie in one block of device memory, which reaches the host in one copy. This module is the only
place that knows the offsets: the Triton kernels, the gate and the host side derive theirs from the slot enums and from
`BlockLayout`. To add a slot, add a member.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum, auto
from itertools import accumulate
from struct import Struct
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from surefoot.records import LAYER_STATS

LAG = 2
"""Steps between sending a block and reading it: the same on every rank, so that all ranks act at the same step."""
_POLL_SECONDS = 0.0002
T = TypeVar("T")
MAX_MICROBATCHES = 64
"""Microbatches of one update that have a line of their own; later ones share the last line."""
NORM_COLUMN = LAYER_STATS.index("norm")
NONFINITE_COLUMN = LAYER_STATS.index("nonfinite")


class _Slot(IntEnum):
    """Index into a vector; `auto()` counts from 0 in the order of the members."""

    @staticmethod
    def _generate_next_value_(name: str, start: int, count: int, last_values: list[Any]) -> int:
        return count


class SummarySlot(_Slot):
    """Start of the summary; after these, each clip unit has two numbers: sum of squares, count of non-finite values."""

    LOSS = auto()
    """Sum over the microbatches, each with the weight it has in the gradients."""
    NUM_MICROBATCHES = auto()
    """How many microbatches that sum holds."""
    ACTIVE_RANKS = auto()
    """1 from each rank that still measures."""
    PARAM_SQUARES = auto()
    """Sum of squares of the weights."""
    NONFINITE_PARAMS = auto()
    """Non-finite values in weights and buffers."""
    UPDATE_SQUARES = auto()
    """Sum of squares of the change made by the last update, over the sampled weights."""
    SAMPLED_SQUARES = auto()
    """Sum of squares of the sampled weights."""
    UNCHANGED_FRACTION = auto()
    """Fraction of the sampled weights that a whole step left unchanged.

    This slot and all after it are averaged over the active ranks on the host; those before are summed on the device.
    """
    INPUT_MEAN = auto()
    INPUT_STD = auto()
    INPUT_ABSMAX = auto()
    """Of the batch; see `StepMetrics`. `measure_batch` writes these three at once, so they stay neighbours."""
    APPLIED_SQUARES = auto()
    """Sum of squares of the gradients handed to the optimizer, when the loop changed them after backward."""
    RANKS_SAVING = auto()
    """1 from each rank that is still writing a checkpoint; the next save starts when none is."""
    NONFINITE_BUFFERS = auto()
    """Buffer values that were finite after the last accepted update and no longer are."""
    PROGRESS = auto()
    """`guard.watch(progress=...)`, averaged over the microbatches so far."""


class VerdictSlot(_Slot):
    """The gate's decision for one optimizer, at the start of the block."""

    VERDICT = auto()
    NORM = auto()
    NONFINITE = auto()
    NORM_LIMIT = auto()
    CLIP_THRESHOLD = auto()
    CLIP_FACTOR = auto()
    LOSS = auto()
    LOSS_SCALE = auto()
    LR = auto()
    WEIGHT_NORM = auto()
    NONFINITE_PARAMS = auto()
    UPDATE_RATIO = auto()
    ACTIVE_RANKS = auto()
    """Ranks that still measure; a rank whose protection has ended only contributes zeros."""


class SharedSlot(_Slot):
    """Host-side numbers that the ranks exchange; after these, learning rate and momentum of each optimizer.

    NaN means unknown. The merged number is the mean over the ranks that know it, so a flag is 1 only when it is set on
    all of them.
    """

    WEIGHTS_MEASURED = auto()
    """The numbers of the weights are new."""
    REPLICAS_MEASURED = auto()
    """The checksum of the replicas is new."""
    INPUTS_MEASURED = auto()
    """The numbers of the batch are new."""
    GRADS_CHANGED = auto()
    """The loop changed the gradients after backward."""
    HAS_LOSS = auto()
    DISCARDED = auto()
    """The gradients were discarded without a step."""
    STALE_GRADS = auto()
    SAMPLES = auto()
    """As in `StepMetrics`."""
    LOSS_SCALE = auto()
    SNAPSHOT_INTERVAL = auto()
    """Updates between two snapshots that this rank proposes; the most count, not the mean."""
    SNAPSHOT_ROOM = auto()
    """Snapshots that this rank has room for; the fewest count."""
    GRADS_DIFFER = auto()
    """The ranks' gradients differ after backward. This slot and the next are computed from the ranks' checksums."""
    APPLIED_GRADS_DIFFER = auto()
    """The gradients handed to the optimizers differ too: the loop did not average them."""


UNITS_START = len(SummarySlot)
"""Index of the first clip unit in the summary."""
NUM_CHECKSUMS = 4
"""Checksums each rank sends after its shared numbers: of its gradients after backward, of the gradients handed to its
optimizer, and of its replicated weights, and then the norm of those weights."""
_NUM_VERDICT = len(VerdictSlot)
_AVERAGED = slice(SummarySlot.UNCHANGED_FRACTION, UNITS_START)
_NO_RANKS = np.zeros(0)


def settings_index(optimizer: int) -> int:
    """Index of an optimizer's learning rate among the shared numbers; its momentum comes next."""
    return len(SharedSlot) + 2 * optimizer


@dataclass(frozen=True, slots=True)
class DeviceBlock:
    """Views of the parts of one block on the device."""

    verdict: Tensor
    """See `VerdictSlot`."""
    summary: Tensor
    """See `SummarySlot`."""
    buffer_nonfinite: Tensor
    """For each checked buffer, how many of its values became non-finite; see `SummarySlot.NONFINITE_BUFFERS`."""
    microbatches: Tensor
    """Loss, sum of squares and non-finite count after each microbatch."""
    rank_summaries: Tensor
    """The `SummarySlot` numbers of each rank; empty on a single rank."""
    rank_values: Tensor
    """The shared numbers and checksums of each rank, see `SharedSlot`; empty on a single rank."""
    stats: Tensor
    """One row of `LAYER_STATS` for each tensor, float32."""


class BlockLayout:
    """Offsets of the parts of a block: numbers of one float type, then float32 statistics of each tensor."""

    def __init__(
        self, dtype: torch.dtype, *, tensors: int, units: int, buffers: int, world_size: int, optimizers: int
    ) -> None:
        self.dtype = dtype
        self.multi_rank = world_size > 1
        ranks = world_size if self.multi_rank else 0
        self.shapes = {
            "verdict": (_NUM_VERDICT,),
            "summary": (UNITS_START + 2 * units,),
            "buffer_nonfinite": (buffers,),
            "microbatches": (MAX_MICROBATCHES, 3),
            "rank_summaries": (ranks, UNITS_START),
            "rank_values": (ranks, settings_index(optimizers) + NUM_CHECKSUMS),
        }
        """Shape of each part, in the order of the parts and of `DeviceBlock`."""
        ends = list(accumulate(math.prod(shape) for shape in self.shapes.values()))
        self.spans = {
            name: slice(start, end) for name, start, end in zip(self.shapes, [0, *ends[:-1]], ends, strict=True)
        }
        self.stats_shape = (tensors, len(LAYER_STATS))
        self.stats_offset = dtype.itemsize * ends[-1]
        """Bytes before the statistics."""
        self.nbytes = self.stats_offset + torch.float32.itemsize * math.prod(self.stats_shape)
        self.numpy_dtype = np.float64 if dtype is torch.float64 else np.float32
        self.slots = Struct(f"={_NUM_VERDICT + UNITS_START}{'d' if dtype is torch.float64 else 'f'}")
        """Verdict and summary slots, which every step needs, at the start of the block."""

    def view_device(self, raw: Tensor) -> DeviceBlock:
        """The parts of a block on the device; writing to them writes to `raw`."""
        values = raw[: self.stats_offset].view(self.dtype)
        parts = {name: values[span].view(self.shapes[name]) for name, span in self.spans.items()}
        return DeviceBlock(**parts, stats=raw[self.stats_offset :].view(torch.float32).view(self.stats_shape))


class HostBlock:
    """A block that was copied to the host: what every step needs, and the other parts on request."""

    __slots__ = ("_layout", "_raw", "rank_losses", "replica_checksums", "shared", "stats", "summary", "verdict")

    def __init__(self, raw: np.ndarray, layout: BlockLayout) -> None:
        self._raw, self._layout = raw, layout
        values = layout.slots.unpack_from(raw.data)
        self.verdict: tuple[float, ...] = values[:_NUM_VERDICT]
        """See `VerdictSlot`."""
        self.summary: tuple[float, ...] = values[_NUM_VERDICT:]
        """See `SummarySlot`; without the clip units."""
        self.stats = np.ndarray(layout.stats_shape, np.float32, raw, layout.stats_offset)
        self.rank_losses = self.shared = _NO_RANKS
        """Loss of each rank, and the merged shared numbers, see `SharedSlot`; empty on a single rank."""
        self.replica_checksums = _NO_RANKS
        """Checksum and norm of each rank's replicated weights; NaN for a rank that has lost its protection."""
        if layout.multi_rank:
            with np.errstate(all="ignore"):  # non-finite values are expected here
                self._read_ranks()

    def _read_ranks(self) -> None:
        summaries = self._part("rank_summaries")
        active = summaries[:, SummarySlot.ACTIVE_RANKS] > 0
        self.rank_losses = summaries[:, SummarySlot.LOSS]
        self.shared, self.replica_checksums = _merge_shared(self._part("rank_values"), active)
        averaged = summaries[active, _AVERAGED]
        known = averaged[~np.isnan(averaged[:, 0]), 0]  # NaN from ranks that own no weights
        unchanged = float(known.mean()) if len(known) else math.nan
        self.summary = (*self.summary[: _AVERAGED.start], unchanged, *averaged[:, 1:].mean(0).tolist())

    @property
    def buffer_nonfinite(self) -> np.ndarray:
        """For each checked buffer, how many of its values became non-finite."""
        return self._part("buffer_nonfinite")

    @property
    def microbatches(self) -> np.ndarray:
        """Loss, sum of squares and non-finite count after each microbatch."""
        return self._part("microbatches")

    def _part(self, name: str) -> np.ndarray:
        layout = self._layout
        values = self._raw[: layout.stats_offset].view(layout.numpy_dtype)
        return values[layout.spans[name]].reshape(layout.shapes[name])


def _merge_shared(values: np.ndarray, active: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The shared numbers that all ranks use, and checksum and norm of each rank's replicas; `values` has a row a rank.

    Ranks that have lost their protection (`active` is false) send zeros, which do not count.
    """
    known = np.where(active[:, None], values, np.nan)
    numbers, checksums = np.hsplit(known, [-NUM_CHECKSUMS])
    count = (~np.isnan(numbers)).sum(0)
    shared = np.where(count > 0, np.nansum(numbers, axis=0) / np.maximum(count, 1), np.nan)
    shared[SharedSlot.SNAPSHOT_ROOM] = np.fmin.reduce(numbers[:, SharedSlot.SNAPSHOT_ROOM])
    shared[SharedSlot.SNAPSHOT_INTERVAL] = np.fmax.reduce(numbers[:, SharedSlot.SNAPSHOT_INTERVAL])
    grads = checksums[active, :2]
    shared[SharedSlot.GRADS_DIFFER : SharedSlot.APPLIED_GRADS_DIFFER + 1] = (grads != grads[:1]).any(0)
    return shared, checksums[:, 2:]


class AsyncReadback(Generic[T]):
    """Sends byte rows with a tag through pinned memory and hands them out `LAG` sends later."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._slots = [torch.empty(size, dtype=torch.uint8, pin_memory=self._cuda) for _ in range(LAG + 1)]
        self._views = [slot.numpy() for slot in self._slots]
        self._events = [torch.cuda.Event() if self._cuda else None for _ in self._slots]
        self._stream: tuple[int, torch.cuda.Stream] | None = None
        """The stream that rows were last sent on, with its raw handle."""
        self._in_flight: deque[tuple[int, T]] = deque()
        self._sent = 0

    def send(self, row: Tensor, tag: T) -> None:
        """Start the copy of a row off the device; returns at once."""
        if len(self._in_flight) > LAG:
            raise AssertionError("a row was not received before the next was sent")
        slot = self._sent % len(self._slots)
        self._sent += 1
        self._slots[slot].copy_(row, non_blocking=True)
        event = self._events[slot]
        if event is not None:
            event.record(self._current_stream(row.device))
        self._in_flight.append((slot, tag))

    def _current_stream(self, device: torch.device) -> torch.cuda.Stream:
        """The current stream; the Stream object is cached because the stream rarely changes."""
        handle = torch._C._cuda_getCurrentRawStream(device.index)
        if self._stream is None or self._stream[0] != handle:
            self._stream = handle, torch.cuda.current_stream(device)
        return self._stream[1]

    def receive(self, *, drain: bool = False) -> Iterator[tuple[np.ndarray, T]]:
        """The rows sent at least `LAG` sends ago, each a copy of its own; with `drain` all that are in flight."""
        while len(self._in_flight) > (0 if drain else LAG):
            slot, tag = self._in_flight.popleft()
            event = self._events[slot]
            # A host more than two steps ahead of the device waits here until two steps are left in the queue, so the
            # device never idles because of it. Polling with short sleeps is not a device synchronisation.
            while event is not None and not event.query():
                time.sleep(_POLL_SECONDS)
            yield self._views[slot].copy(), tag
