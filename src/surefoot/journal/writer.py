"""The journal as training sees it: raises when it is opened or not at all."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from surefoot.journal.lock import WriterLock
from surefoot.journal.row_writer import RowWriter
from surefoot.journal.run_json import SIGNALS_DIR, write_run_json, find_last_attempt
from surefoot.journal.segments import remove_leftovers
from surefoot.journal.worker import WriterThread, describe_error
from surefoot.journal.write_queue import WriteQueue
from surefoot.records import Event, StepMetrics

log = logging.getLogger("surefoot")
_CLOSE_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class JournalLimits:
    """Sizes and periods of a journal; the defaults suit every run, tests make them small."""

    queue_rows: int = 8192
    queue_bytes: int = 64_000_000
    queue_events: int = 65_536
    window: int = 10_000
    """Per-layer rows kept in full."""
    budget: int = 750_000_000
    """Bytes of per-layer rows on disk; a million scalar rows come on top with under 150 MB."""
    heartbeat: float = 2.0
    sync_seconds: float = 10.0


class Journal:
    """Writes the truth of one run to its directory; raises ValueError when opened and nothing ever after.

    Rank 0 holds the directory's lock and writes everything; other ranks write their events only. When the disk fails
    or another process takes the directory, the journal stops: `failure` says why, `on_failure(reason)` is called once
    from the journal's thread, and every later call does nothing, as all calls do in a forked child. `last_attempt` is
    the highest attempt found in the directory, -1 for none; counting goes on after it.
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
        self.run_dir = Path(run_dir).absolute()  # the loop may change its working directory
        self.rank = rank
        self.listeners: list[Callable[[Event], None]] = []
        """Who hears of every event as it is recorded, also when the disk has failed."""
        self._pid = os.getpid()
        self._closed = False
        self._lock = WriterLock(self.run_dir, interval=limits.heartbeat) if rank == 0 else None
        self._queue = WriteQueue(rows=limits.queue_rows, row_bytes=limits.queue_bytes, events=limits.queue_events)
        try:
            self._prepare(info)
            scribe = RowWriter(self.run_dir, rank=rank, window=limits.window, budget=limits.budget)
        except BaseException as error:
            with contextlib.suppress(OSError):
                if self._lock is not None:
                    self._lock.release()
            if not isinstance(error, OSError):
                raise
            raise ValueError(
                f"cannot keep a journal in {self.run_dir}: {describe_error(error)}."
                f" Choose a run_dir on a disk that can be written to and has room"
            ) from error
        self._thread = WriterThread(
            self._queue,
            scribe,
            self._lock,
            on_failure=on_failure,
            heartbeat=limits.heartbeat,
            sync_seconds=limits.sync_seconds,
        )
        self._thread.start()
        atexit.register(self.close)

    @property
    def failure(self) -> str | None:
        """Why nothing more is written, in words; None while all is well."""
        return self._thread.failure

    def layout(self, names: Sequence[str], numels: Sequence[int]) -> None:
        """Declare the tensors of the layer rows that follow."""
        if not self._silent():
            self._queue.put_layout(names, numels)

    def row(self, row: StepMetrics, layers: np.ndarray | None = None) -> None:
        """Record one attempted update and, if measured, its [tensors, LAYER_STATS] numbers, which are copied."""
        if not self._silent():
            self._queue.put_row(row, layers)

    def event(self, event: Event) -> None:
        """Record an event as it stands now; a `time` of 0 becomes the present."""
        for listener in tuple(self.listeners):
            self._hand(event, listener)
        if not self._silent():
            self._queue.put_event(event)

    def _hand(self, event: Event, listener: Callable[[Event], None]) -> None:
        try:
            listener(event)
        except Exception as error:
            self.listeners.remove(listener)
            log.error("surefoot: %r listens no longer, training goes on: %r", listener, error, exc_info=error)

    def flush(self, timeout: float = 5.0) -> bool:
        """Wait until all that was recorded so far is in its files; False if it took too long or the journal stopped."""
        if self._silent():
            return False
        return self._queue.put_marker().done.wait(timeout) and self.failure is None

    def close(self) -> None:
        """Write what is left, give back the lock and end the thread; may be called again."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        atexit.unregister(self.close)
        mark = self._queue.put_marker(last=True)
        if threading.current_thread() is not self._thread:
            mark.done.wait(_CLOSE_SECONDS)  # a disk that hangs must not keep the process from ending

    def _silent(self) -> bool:
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
