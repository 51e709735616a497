"""Numbers leave the device behind the work it is doing, and are read exactly two steps later."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

LAG = 2
"""Steps between sending a row and reading it: the same on every process, so that all act at the same step."""
_POLL = 0.0002


T = TypeVar("T")


class AsyncReadback(Generic[T]):
    """Sends byte rows with a tag through page-locked memory and hands them out `LAG` sends later."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._slots = [torch.empty(size, dtype=torch.uint8, pin_memory=self._cuda) for _ in range(LAG + 1)]
        self._views = [slot.numpy() for slot in self._slots]
        self._events = [torch.cuda.Event() if self._cuda else None for _ in self._slots]
        self._stream: tuple[int, torch.cuda.Stream] | None = None
        """The stream rows were last sent on, with the driver's name for it."""
        self._under_way: deque[tuple[int, T]] = deque()
        self._sent = 0

    def send(self, row: Tensor, tag: T) -> None:
        """Start the copy of a row off the device; returns at once."""
        if len(self._under_way) > LAG:
            raise AssertionError("a row was not received before the next was sent")
        slot = self._sent % len(self._slots)
        self._sent += 1
        self._slots[slot].copy_(row, non_blocking=True)
        event = self._events[slot]
        if event is not None:
            event.record(self._current(row.device))
        self._under_way.append((slot, tag))

    def _current(self, device: torch.device) -> torch.cuda.Stream:
        """The stream in use: nearly always the one from before, which need not be made anew."""
        name = torch._C._cuda_getCurrentRawStream(device.index)
        if self._stream is None or self._stream[0] != name:
            self._stream = name, torch.cuda.current_stream(device)
        return self._stream[1]

    def due(self) -> Iterator[tuple[np.ndarray, T]]:
        """The rows sent at least `LAG` sends ago, each a copy of its own."""
        while len(self._under_way) > LAG:
            yield self._receive()

    def rest(self) -> Iterator[tuple[np.ndarray, T]]:
        """All rows still under way; waits for the device."""
        while self._under_way:
            yield self._receive()

    def _receive(self) -> tuple[np.ndarray, T]:
        slot, tag = self._under_way.popleft()
        event = self._events[slot]
        # A host that runs more than two steps ahead of the device stops here until two steps are left in the queue:
        # the device never idles for it. Asking in small pauses is not a device synchronisation.
        while event is not None and not event.query():
            time.sleep(_POLL)
        return self._views[slot].copy(), tag
