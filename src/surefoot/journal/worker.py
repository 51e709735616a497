"""The journal's thread: writes what the inbox holds, beats the lock, and fails alone."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from surefoot.journal.lock import WriterLock
from surefoot.journal.row_writer import RowWriter
from surefoot.journal.write_queue import Item, LayerLayout, FlushMarker, RowItem, WriteQueue, event_line
from surefoot.records import Note


class WriterThread(threading.Thread):
    """Writes until the last mark; after a failure it only empties the inbox and beats the lock while that is ours."""

    def __init__(
        self,
        inbox: WriteQueue,
        scribe: RowWriter,
        lock: WriterLock | None,
        *,
        on_failure: Callable[[str], None],
        heartbeat: float,
        sync_seconds: float,
    ) -> None:
        super().__init__(name="surefoot-journal", daemon=True)
        self.failure: str | None = None
        self._inbox, self._scribe, self._lock = inbox, scribe, lock
        self._on_failure = on_failure
        self._heartbeat, self._sync_seconds = heartbeat, sync_seconds
        self._beaten = self._synced = time.monotonic()
        self._newest = (0, 0)
        self._told = (0, 0, 0)

    def run(self) -> None:
        ended = False
        while not ended:
            batch = self._inbox.get_batch(self._heartbeat / 2)
            marks = [item for item in batch if isinstance(item, FlushMarker)]
            ended = any(mark.last for mark in marks)
            try:
                self._beat()
                if self.failure is None:
                    self._write(batch)
                    self._sync(now=ended)
            except Exception as error:
                self._fail(describe_error(error))
            if ended:
                self._end()
            for mark in marks:
                mark.done.set()

    def _write(self, batch: Sequence[Item]) -> None:
        # Events first: should we be killed in between, they are the greater loss.
        self._scribe.write_events([item for item in batch if isinstance(item, bytes)])
        rows: list[RowItem] = []
        for item in batch:
            if isinstance(item, LayerLayout):
                self._scribe.write_rows(rows)
                rows = []
                self._scribe.set_layout(item.names, item.numels)
            elif isinstance(item, tuple):
                rows.append(item)
                self._newest = (item[0].step, item[0].attempt)
        self._scribe.write_rows(rows)
        self._tell_losses()
        # New rows wait in memory meanwhile, where a kill would lose them: little at a time, unless many come at a time.
        self._scribe.thin(1 + len(batch) // 256)

    def _tell_losses(self) -> None:
        lost = (self._inbox.lost_rows, self._inbox.lost_events, self._scribe.unwritable)
        if lost == self._told:
            return
        names = ("rows", "events", "unwritable")
        values = {name: now - told for name, now, told in zip(names, lost, self._told, strict=True)}
        self._told = lost
        detail = "the disk was too slow for the queue, or a value could not be written; these are missing here"
        step, attempt = self._newest
        rank = self._scribe.rank
        note = Note(step=step, attempt=attempt, rank=rank, name="journal_lost", detail=detail, values=values)
        self._scribe.write_events([event_line(note)])

    def _sync(self, *, now: bool) -> None:
        if now or time.monotonic() - self._synced >= self._sync_seconds:
            self._scribe.sync()
            self._synced = time.monotonic()

    def _beat(self) -> None:
        """Beat before writing, so that after a long stall we find the lock gone before we touch another's files."""
        if self._lock is None or time.monotonic() - self._beaten < self._heartbeat:
            return
        if not self._lock.refresh():
            lost, self._lock = self._lock.path, None
            self._fail(f"the run directory is no longer ours: {lost} was removed or taken over by another process")
        self._beaten = time.monotonic()

    def _fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason
            with contextlib.suppress(Exception):  # whatever the listener does, the lock needs its beats
                self._on_failure(reason)

    def _end(self) -> None:
        try:
            self._scribe.close()
        except OSError as error:
            self._fail(describe_error(error))
        with contextlib.suppress(OSError):  # a disk that is gone: the next writer finds a lock that no longer beats
            if self._lock is not None:
                self._lock.release()


def describe_error(error: BaseException) -> str:
    if not isinstance(error, OSError):
        return f"{type(error).__name__}: {error}"
    return (error.strerror or str(error)) + (f" ({error.filename})" if error.filename else "")
