"""Copies rows off the device behind the work it is doing; each row is read exactly `LAG` steps later."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

LAG = 2
"""Steps between sending a row and reading it: the same on every rank, so that all ranks act at the same step."""
_POLL_SECONDS = 0.0002


T = TypeVar("T")


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
