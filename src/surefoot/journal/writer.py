"""The journal as training sees it, the queue behind it, where putting never waits and never raises, and the thread that
writes to disk."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import numpy as np

from surefoot.journal.lock import WriterLock
from surefoot.journal.row_writer import RowWriter
from surefoot.journal.run_json import SIGNALS_DIR, find_last_attempt, write_run_json
from surefoot.journal.segments import remove_leftovers
from surefoot.journal.strict_json import dumps
from surefoot.records import LAYER_STATS, Event, Note, StepMetrics

log = logging.getLogger("surefoot")
_CLOSE_SECONDS = 30.0
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


class Companion(Protocol):
    """Goes with a journal, behind training: it is called in the journal's thread, must not wait, and never again after
    it has raised."""

    def received(self, items: Sequence[Item]) -> None:
        """Rows, layouts and encoded events that are about to be written."""

    def journal_failed(self, reason: str) -> None: ...

    def close(self) -> None:
        """The journal is closed; everything was received. Called in the thread that closes it."""


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


@dataclass(frozen=True, kw_only=True)
class JournalLimits:
    """Sizes and periods of a journal; the defaults suit every run, tests make them small."""

    queue_rows: int = 8192
    queue_bytes: int = 64_000_000
    queue_events: int = 65_536
    window: int = 10_000
    """Per-layer rows kept in full."""
    budget: int = 750_000_000
    """Bytes of per-layer rows on disk; a million scalar rows add less than 150 MB."""
    heartbeat: float = 2.0
    sync_seconds: float = 10.0


class Journal:
    """Writes the record of one run to its directory; only opening it raises (ValueError), no later call does.

    Rank 0 holds the directory's lock and writes everything; other ranks write only their events. When the disk fails
    or another process takes over the directory, the journal stops: `failure` says why, `on_failure(reason)` is called
    once from the journal's thread, and every later call does nothing, as all calls do in a forked child. `last_attempt`
    is the highest attempt found in the directory, -1 for none; counting continues after it.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        *,
        rank: int = 0,
        info: Mapping[str, Any],
        on_failure: Callable[[str], None],
        limits: JournalLimits | None = None,
    ) -> None:
        limits = limits or JournalLimits()
        self.run_dir = Path(run_dir).absolute()  # the training loop may change its working directory
        self.rank = rank
        self.listeners: list[Callable[[Event], None]] = []
        """Called with every event as it is recorded, also after the disk has failed."""
        self.companions: list[Companion] = []
        self._pid = os.getpid()
        self._closed = False
        self._lock = WriterLock(self.run_dir, interval=limits.heartbeat) if rank == 0 else None
        self._queue = WriteQueue(rows=limits.queue_rows, row_bytes=limits.queue_bytes, events=limits.queue_events)
        try:
            self._prepare(info)
            row_writer = RowWriter(self.run_dir, rank=rank, window=limits.window, budget=limits.budget)
        except BaseException as error:
            with contextlib.suppress(OSError):
                if self._lock is not None:
                    self._lock.release()
            if not isinstance(error, OSError):
                raise
            raise ValueError(
                f"cannot write a journal to {self.run_dir}: {_describe_error(error)}."
                f" Choose a run_dir on a writable disk with free space"
            ) from error
        self._thread = WriterThread(
            self._queue,
            row_writer,
            self._lock,
            on_failure=on_failure,
            companions=self.companions,
            heartbeat=limits.heartbeat,
            sync_seconds=limits.sync_seconds,
        )
        self._thread.start()
        atexit.register(self.close)

    @property
    def failure(self) -> str | None:
        """Why the journal stopped writing; None while it works."""
        return self._thread.failure

    def layout(self, names: Sequence[str], numels: Sequence[int]) -> None:
        """Declare the tensors of the layer rows that follow."""
        if not self._stopped():
            self._queue.put_layout(names, numels)

    def row(self, row: StepMetrics, layers: np.ndarray | None = None) -> None:
        """Record one attempted update and, if measured, its [tensors, LAYER_STATS] numbers, which are copied."""
        if not self._stopped():
            self._queue.put_row(row, layers)

    def event(self, event: Event) -> None:
        """Record an event with its present values; a `time` of 0 becomes the current time."""
        for listener in tuple(self.listeners):
            self._notify(listener, event)
        if not self._stopped():
            self._queue.put_event(event)

    def _notify(self, listener: Callable[[Event], None], event: Event) -> None:
        try:
            listener(event)
        except Exception as error:
            self.listeners.remove(listener)
            log.error(
                "surefoot: event listener %r failed and was removed; training continues: %r",
                listener,
                error,
                exc_info=error,
            )

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until everything recorded so far is written; False after a timeout or when the journal has stopped."""
        if self._stopped():
            return False
        return self._queue.put_marker().done.wait(timeout) and self.failure is None

    def close(self) -> None:
        """Write the remaining items, release the lock and end the thread; may be called again."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self.close)
        marker = self._queue.put_marker(last=True)
        if threading.current_thread() is not self._thread:
            marker.done.wait(_CLOSE_SECONDS)  # a stalled disk must not keep the process from exiting
        _tell_all(self.companions, lambda companion: companion.close())

    def _stopped(self) -> bool:
        return self._thread.failure is not None or self._closed or os.getpid() != self._pid

    def _prepare(self, info: Mapping[str, Any]) -> None:
        self.run_dir.mkdir(parents=True, exist_ok=True)
        if self._lock is not None:
            self._lock.acquire()
            (self.run_dir / SIGNALS_DIR).mkdir(exist_ok=True)
            remove_leftovers(self.run_dir / SIGNALS_DIR)
        self.last_attempt = find_last_attempt(self.run_dir)
        if self._lock is not None:
            write_run_json(self.run_dir, info)


class WriterThread(threading.Thread):
    """Writes the queue until the last marker; after a failure it only drains it and refreshes the lock while held."""

    def __init__(
        self,
        queue: WriteQueue,
        row_writer: RowWriter,
        lock: WriterLock | None,
        *,
        on_failure: Callable[[str], None],
        companions: list[Companion],
        heartbeat: float,
        sync_seconds: float,
    ) -> None:
        super().__init__(name="surefoot-journal", daemon=True)
        self.failure: str | None = None
        self._queue, self._row_writer, self._lock = queue, row_writer, lock
        self._on_failure, self._companions = on_failure, companions
        self._heartbeat, self._sync_seconds = heartbeat, sync_seconds
        self._refreshed_at = self._synced_at = time.monotonic()
        self._last_step = (0, 0)
        self._reported_losses = (0, 0, 0)

    def run(self) -> None:
        ended = False
        while not ended:
            batch = self._queue.get_batch(self._heartbeat / 2)
            markers = [item for item in batch if isinstance(item, FlushMarker)]
            ended = any(marker.last for marker in markers)
            if self._companions and batch:
                _tell_all(self._companions, lambda companion, batch=batch: companion.received(batch))
            try:
                self._refresh_lock()
                if self.failure is None:
                    self._write(batch)
                    self._sync(now=ended)
            except Exception as error:
                self._fail(_describe_error(error))
            if ended:
                self._end()
            for marker in markers:
                marker.done.set()

    def _write(self, batch: Sequence[Item]) -> None:
        # Events first: if the process is killed in between, losing them would hurt more.
        self._row_writer.write_events([item for item in batch if isinstance(item, bytes)])
        rows: list[RowItem] = []
        for item in batch:
            if isinstance(item, LayerLayout):
                self._row_writer.write_rows(rows)
                rows = []
                self._row_writer.set_layout(item.names, item.numels)
            elif isinstance(item, tuple):
                rows.append(item)
                self._last_step = (item[0].step, item[0].attempt)
        self._row_writer.write_rows(rows)
        self._report_losses()
        # New rows wait in memory during this, where a kill would lose them: few jobs at a time, unless rows come fast.
        self._row_writer.thin(1 + len(batch) // 256)

    def _report_losses(self) -> None:
        losses = (self._queue.lost_rows, self._queue.lost_events, self._row_writer.unwritable)
        if losses == self._reported_losses:
            return
        names = ("rows", "events", "unwritable")
        values = {name: now - old for name, now, old in zip(names, losses, self._reported_losses, strict=True)}
        self._reported_losses = losses
        detail = "not recorded, because the disk was too slow for the queue or a value could not be encoded"
        step, attempt = self._last_step
        rank = self._row_writer.rank
        note = Note(step=step, attempt=attempt, rank=rank, name="journal_lost", detail=detail, values=values)
        self._row_writer.write_events([event_line(note)])

    def _sync(self, *, now: bool) -> None:
        if now or time.monotonic() - self._synced_at >= self._sync_seconds:
            self._row_writer.sync()
            self._synced_at = time.monotonic()

    def _refresh_lock(self) -> None:
        """Refresh before writing: after a long stall this detects a lost lock before we write to another's files."""
        if self._lock is None or time.monotonic() - self._refreshed_at < self._heartbeat:
            return
        if not self._lock.refresh():
            path, self._lock = self._lock.path, None
            self._fail(f"lost the run directory: {path} was removed or taken over by another process")
        self._refreshed_at = time.monotonic()

    def _fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason
            _tell_all(self._companions, lambda companion: companion.journal_failed(reason))
            with contextlib.suppress(Exception):  # whatever the callback does, the lock must be refreshed
                self._on_failure(reason)

    def _end(self) -> None:
        try:
            self._row_writer.close()
        except OSError as error:
            self._fail(_describe_error(error))
        with contextlib.suppress(OSError):  # the disk is gone: the next writer finds a lock that is no longer refreshed
            if self._lock is not None:
                self._lock.release()


def _tell_all(companions: list[Companion], call: Callable[[Companion], object]) -> None:
    for companion in tuple(companions):
        try:
            call(companion)
        except Exception as error:
            companions.remove(companion)
            name = type(companion).__name__
            log.error("surefoot: %s failed and is not used any more: %r", name, error, exc_info=error)


def _describe_error(error: BaseException) -> str:
    if not isinstance(error, OSError):
        return f"{type(error).__name__}: {error}"
    return (error.strerror or str(error)) + (f" ({error.filename})" if error.filename else "")
