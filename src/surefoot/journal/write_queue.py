"""The queue between training and the journal's thread: putting never waits and never raises."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

import numpy as np

from surefoot.journal.strict_json import dumps
from surefoot.records import LAYER_STATS, Event, StepMetrics

BATCH_SECONDS = 0.25
"""How long rows may wait in memory to be written together; a kill loses at most these."""
_BATCH_ITEMS = 1024
_MIN_ROWS = 16
_FLOAT = np.dtype("<f4")

RowItem = tuple[StepMetrics, np.ndarray | None]


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """The tensors of the rows that follow."""

    names: tuple[str, ...]
    numels: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlushMarker:
    """A point in the queue: `done` is set when all items before it are written; nothing follows the `last`."""

    last: bool
    done: threading.Event = field(default_factory=threading.Event)


Item = RowItem | bytes | LayerLayout | FlushMarker


class WriteQueue:
    """Holds unwritten items; when the disk is too slow it drops rows first, events much later, and counts both."""

    def __init__(self, *, rows: int, row_bytes: int, events: int) -> None:
        # A signal handler may call put() inside put(): SimpleQueue is reentrant, a queue with a lock would hang.
        self._queue: SimpleQueue[Item] = SimpleQueue()
        self._wakeup: SimpleQueue[None] = SimpleQueue()
        self._rows, self._row_bytes, self._events = rows, row_bytes, events
        self._max_rows = rows
        self.lost_rows = 0
        self.lost_events = 0

    def put_layout(self, names: Sequence[str], numels: Sequence[int]) -> None:
        bytes_per_row = 4 * len(LAYER_STATS) * max(1, len(names))
        self._max_rows = max(_MIN_ROWS, min(self._rows, self._row_bytes // bytes_per_row))
        self._queue.put(LayerLayout(tuple(names), tuple(numels)))

    def put_row(self, row: StepMetrics, layers: np.ndarray | None) -> None:
        if self._queue.qsize() >= self._max_rows:
            self.lost_rows += 1
            return
        try:
            # Copied: the caller reads every step's numbers into the same buffer.
            self._queue.put((row, None if layers is None else np.array(layers, _FLOAT)))
        except Exception:
            self.lost_rows += 1

    def put_event(self, event: Event) -> None:
        if self._queue.qsize() >= self._events:
            self.lost_events += 1
            return
        try:
            # Encoded at once: the caller may change the evidence afterwards.
            self._queue.put(event_line(event))
            self._wakeup.put(None)
        except Exception:
            self.lost_events += 1

    def put_marker(self, *, last: bool = False) -> FlushMarker:
        marker = FlushMarker(last)
        self._queue.put(marker)
        self._wakeup.put(None)
        return marker

    def get_batch(self, timeout: float) -> list[Item]:
        """The waiting items, up to one batch; only events and markers end the wait early.

        Each wake-up of this thread takes the GIL from training for a moment, so rows alone do not wake it.
        """
        with contextlib.suppress(Empty):
            if self._queue.qsize() < _BATCH_ITEMS:
                self._wakeup.get(timeout=min(timeout, BATCH_SECONDS))
            while True:
                self._wakeup.get_nowait()
        batch: list[Item] = []
        with contextlib.suppress(Empty):
            while len(batch) < _BATCH_ITEMS:
                batch.append(self._queue.get_nowait())
        return batch


def event_line(event: Event) -> bytes:
    """An event as one line of JSON; a `time` of 0 becomes the current time."""
    content = event.as_json()
    content["time"] = content.get("time") or time.time()
    return dumps(content).encode("ascii") + b"\n"
