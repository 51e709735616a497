"""The queue between training and the journal's thread: putting in never waits and never raises."""

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
"""Seconds that rows may wait in memory to be written together; what a kill can lose."""
_BATCH = 1024
_FEWEST_ROWS = 16
_FLOAT = np.dtype("<f4")

RowItem = tuple[StepMetrics, np.ndarray | None]


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """The tensors of the rows that follow."""

    names: tuple[str, ...]
    numels: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlushMarker:
    """A place in the queue: `done` is set when all before it is written; nothing comes after the `last`."""

    last: bool
    done: threading.Event = field(default_factory=threading.Event)


Item = RowItem | bytes | LayerLayout | FlushMarker


class WriteQueue:
    """Holds what is not written yet; when the disk is too slow it loses rows first, events much later, and counts."""

    def __init__(self, *, rows: int, row_bytes: int, events: int) -> None:
        # Its put() may be called within itself, as a signal handler does; a queue that holds a lock would hang.
        self._queue: SimpleQueue[Item] = SimpleQueue()
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._rows, self._row_bytes, self._events = rows, row_bytes, events
        self._most_rows = rows
        self.lost_rows = 0
        self.lost_events = 0

    def put_layout(self, names: Sequence[str], numels: Sequence[int]) -> None:
        one = 4 * len(LAYER_STATS) * max(1, len(names))
        self._most_rows = max(_FEWEST_ROWS, min(self._rows, self._row_bytes // one))
        self._queue.put(LayerLayout(tuple(names), tuple(numels)))

    def put_row(self, row: StepMetrics, layers: np.ndarray | None) -> None:
        if self._queue.qsize() >= self._most_rows:
            self.lost_rows += 1
            return
        try:
            # A copy: the caller reads every step's numbers into the same buffer.
            self._queue.put((row, None if layers is None else np.array(layers, _FLOAT)))
        except Exception:
            self.lost_rows += 1

    def put_event(self, event: Event) -> None:
        if self._queue.qsize() >= self._events:
            self.lost_events += 1
            return
        try:
            # To bytes at once: the evidence may be changed after it was handed in.
            self._queue.put(event_line(event))
            self._bell.put(None)
        except Exception:
            self.lost_events += 1

    def put_marker(self, *, last: bool = False) -> FlushMarker:
        mark = FlushMarker(last)
        self._queue.put(mark)
        self._bell.put(None)
        return mark

    def get_batch(self, timeout: float) -> list[Item]:
        """What is waiting, up to one batch; an event is waited for, rows are let come together.

        Every waking of this thread takes the interpreter from the training for a moment, so rows alone do not wake it.
        """
        with contextlib.suppress(Empty):
            if self._queue.qsize() < _BATCH:
                self._bell.get(timeout=min(timeout, BATCH_SECONDS))
            while True:
                self._bell.get_nowait()
        batch: list[Item] = []
        with contextlib.suppress(Empty):
            while len(batch) < _BATCH:
                batch.append(self._queue.get_nowait())
        return batch


def event_line(event: Event) -> bytes:
    """An event as one line of JSON; a `time` of 0 becomes the present."""
    content = event.as_json()
    content["time"] = content.get("time") or time.time()
    return dumps(content).encode("ascii") + b"\n"
