"""Writes rows and events to the files they belong to; knows nothing of queues, threads and locks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path

import numpy as np

from surefoot.journal.pyramid_writer import PyramidWriter
from surefoot.journal.row_file import (
    SCALARS_HEADER,
    AppendFile,
    BadHeader,
    RowFile,
    RowHeader,
    layers_header,
    open_line_file,
    read_header,
)
from surefoot.journal.run_json import SIGNALS_DIR, events_filename
from surefoot.journal.segments import Segment, list_segments, open_segment
from surefoot.journal.thinning import ClosedSegment, HistoryLimits, next_job, run_job
from surefoot.records import LAYER_STATS, StepMetrics

_values = attrgetter(*(f.name for f in fields(StepMetrics)))


class RowWriter:
    """Owns the open files of one journal and raises their OSErrors; each file is opened by the first write to it."""

    def __init__(self, run_dir: Path, *, rank: int, window: int, budget: int) -> None:
        self._run_dir, self.rank = run_dir, rank
        self._events: AppendFile | None = None
        self._scalars: RowFile | None = None
        self._layers = LayerWriter(run_dir / SIGNALS_DIR, window=window, budget=budget) if rank == 0 else None
        self._pyramid = PyramidWriter(run_dir / SIGNALS_DIR, "scalars")
        self.unwritable = 0
        """Rows, or layer statistics of rows, whose values do not fit the file's columns."""

    def write_events(self, lines: Sequence[bytes]) -> None:
        if lines:
            if self._events is None:
                self._events = open_line_file(self._run_dir / events_filename(self.rank))
            self._events.write(b"".join(lines))

    def set_layout(self, names: Sequence[str], numels: Sequence[int]) -> None:
        if self._layers is not None:
            self._layers.set_layout(names, numels)

    def write_rows(self, rows: Sequence[tuple[StepMetrics, np.ndarray | None]]) -> None:
        if not rows or self._layers is None:
            return
        if self._scalars is None:
            self._scalars = open_segment(self._run_dir / SIGNALS_DIR, SCALARS_HEADER)[1]
            self._pyramid.begin(SCALARS_HEADER)
        scalars, stats = self._encode(rows)
        self._scalars.append(scalars)
        self._pyramid.add(scalars)
        shape = (self._layers.num_tensors, len(LAYER_STATS))
        measured = {at: values for at, values in enumerate(stats) if values is not None}
        fitting = {at: values for at, values in measured.items() if values.shape == shape}
        self.unwritable += len(measured) - len(fitting)
        if fitting and self._layers.num_tensors:
            self._layers.append(scalars[list(fitting)], list(fitting.values()))

    def thin(self, max_jobs: int) -> None:
        """Thin old layer rows, `max_jobs` small jobs at most."""
        for _ in range(max_jobs):
            if self._layers is None or not self._layers.thin_once():
                return

    def sync(self) -> None:
        for file in (self._events, self._scalars, self._layers, self._pyramid):
            if file is not None:
                file.sync()

    def close(self) -> None:
        for file in (self._events, self._scalars, self._layers, self._pyramid):
            if file is not None:
                file.close()

    def _encode(
        self, rows: Sequence[tuple[StepMetrics, np.ndarray | None]]
    ) -> tuple[np.ndarray, list[np.ndarray | None]]:
        encoded = _as_array([row for row, _ in rows])
        if encoded is None:  # some row holds a value that is not a number: keep the others
            writable = [item for item in rows if _as_array([item[0]]) is not None]
            self.unwritable += len(rows) - len(writable)
            rows = writable
            encoded = _as_array([row for row, _ in rows])
            assert encoded is not None
        return encoded, [stats for _, stats in rows]


def _as_array(rows: Sequence[StepMetrics]) -> np.ndarray | None:
    try:
        with np.errstate(all="ignore"):
            return np.array([_values(row) for row in rows], SCALARS_HEADER.dtype)
    except Exception:
        return None


class LayerWriter:
    """Appends layer rows to segments and thins old segments, one small job at a time.

    The last `window` rows are kept in full and older ones ever thinner, so a million steps of 300 tensors and their
    scalars stay under 1 GB; rows of refused updates are kept. The limit of `budget` bytes comes first: with over a
    thousand tensors the full window shrinks, and where refused updates alone exceed the budget they are thinned too.
    """

    def __init__(self, folder: Path, *, window: int, budget: int) -> None:
        self._folder, self._window, self._budget = folder, window, budget
        self._header: RowHeader | None = None
        self._limits = HistoryLimits(window=window, segment_rows=1, budget=budget)
        self._closed = _closed_segments(folder)
        self._open: tuple[Segment, RowFile] | None = None
        self._pyramid = PyramidWriter(folder, "layers")
        self._nothing_to_thin = False

    @property
    def num_tensors(self) -> int:
        """How many tensors each row must have; 0 before a layout is known."""
        return len(self._header.names) if self._header else 0

    def set_layout(self, names: Sequence[str], numels: Sequence[int]) -> None:
        header = layers_header(names, numels)
        if header == self._header:
            return
        self._close_segment()
        self._header = header
        self._pyramid.begin(header)
        self._limits = HistoryLimits.for_row_size(header.dtype.itemsize, window=self._window, budget=self._budget)

    def append(self, scalars: np.ndarray, stats: Sequence[np.ndarray]) -> None:
        """Append rows: step, attempt and verdict from `scalars`, and [tensors, statistics] for each."""
        assert self._header is not None
        rows = np.zeros(len(scalars), self._header.dtype)
        for name in ("step", "attempt", "verdict"):
            rows[name] = scalars[name]
        for destination, values in zip(rows["stats"], stats, strict=True):
            destination[:] = values
        while len(rows):
            file = self._open_file()
            room = self._limits.segment_rows - file.rows
            file.append(rows[:room])
            self._pyramid.add(rows[:room])
            rows = rows[room:]
            if file.rows >= self._limits.segment_rows:
                self._close_segment()

    def thin_once(self) -> bool:
        """Run one thinning job; False when there is none left."""
        if self._nothing_to_thin or self._header is None:
            return False
        newer_rows, open_bytes = (self._open[1].rows, self._open[1].size) if self._open else (0, 0)
        job = next_job(self._closed, self._limits, newer_rows=newer_rows, open_bytes=open_bytes)
        if job is None:
            self._nothing_to_thin = True
            return False
        thinned = run_job(job)
        at = self._closed.index(job.segments[0])
        self._closed[at : at + len(job.segments)] = [thinned] if thinned else []
        return True

    def sync(self) -> None:
        if self._open:
            self._open[1].sync()
        self._pyramid.sync()

    def close(self) -> None:
        self._pyramid.close()
        if self._open:
            self._open[1].close()
            self._open = None

    def _open_file(self) -> RowFile:
        if self._open is None:
            assert self._header is not None
            self._open = open_segment(self._folder, self._header, max_rows=self._limits.segment_rows)
            # The newest file of an earlier attach counted as closed until now.
            self._closed = [closed for closed in self._closed if closed.segment != self._open[0]]
        return self._open[1]

    def _close_segment(self) -> None:
        if self._open is None:
            return
        segment, file = self._open
        file.sync()
        file.close()
        self._closed.append(ClosedSegment(segment, file.header, file.rows, file.size))
        self._open = None
        self._nothing_to_thin = False


def _closed_segments(folder: Path) -> list[ClosedSegment]:
    closed = []
    for segment in list_segments(folder, "layers"):
        try:
            header, start, rows = read_header(segment.path)
        except BadHeader:
            continue
        if "verdict" in (header.dtype.names or ()):  # rows of another schema are left as they are
            closed.append(ClosedSegment(segment, header, rows, start + rows * header.dtype.itemsize))
    return closed
