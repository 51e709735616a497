"""The per-layer rows of a run: full for the newest, thinner the older, and never more than the budget on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from surefoot.journal.row_file import BadHeader, RowHeader, RowFile, layers_header, read_header
from surefoot.journal.segments import Segment, list_segments, open_segment
from surefoot.journal.thinning import HistoryLimits, ClosedSegment, run_job, next_job


class LayerWriter:
    """Appends layer rows and thins old ones, one small job at a time.

    The last `window` rows stay in full and older ones ever thinner, so a million steps of 300 tensors and their scalars
    stay under 1 GB; rows of updates that did not land are spared. The bound of `budget` bytes comes first: with over a
    thousand tensors the full window shrinks, and where refused updates alone would break it they are thinned as well.
    """

    def __init__(self, folder: Path, *, window: int, budget: int) -> None:
        self._folder, self._window, self._budget = folder, window, budget
        self._header: RowHeader | None = None
        self._bounds = HistoryLimits(window=window, segment_rows=1, budget=budget)
        self._parts = _parts(folder)
        self._open: tuple[Segment, RowFile] | None = None
        self._settled = False

    @property
    def tensors(self) -> int:
        """How many tensors the rows must have; 0 before a layout is known."""
        return len(self._header.names) if self._header else 0

    def set_layout(self, names: Sequence[str], numels: Sequence[int]) -> None:
        header = layers_header(names, numels)
        if header == self._header:
            return
        self._end_segment()
        self._header = header
        self._bounds = HistoryLimits.for_row_size(header.dtype.itemsize, window=self._window, budget=self._budget)

    def append(self, marks: np.ndarray, stats: Sequence[np.ndarray]) -> None:
        """Add rows: columns step, attempt and verdict of each, and its [tensors, statistics]."""
        assert self._header is not None
        rows = np.zeros(len(marks), self._header.dtype)
        for name in ("step", "attempt", "verdict"):
            rows[name] = marks[name]
        for values, own in zip(rows["stats"], stats, strict=True):
            values[:] = own
        while len(rows):
            file = self._segment()
            room = self._bounds.segment_rows - file.rows
            file.append(rows[:room])
            rows = rows[room:]
            if file.rows >= self._bounds.segment_rows:
                self._end_segment()

    def thin_once(self) -> bool:
        """Do one job of thinning; False when there is none left."""
        if self._settled or self._header is None:
            return False
        newer, growing = (self._open[1].rows, self._open[1].size) if self._open else (0, 0)
        job = next_job(self._parts, self._bounds, newer_rows=newer, open_bytes=growing)
        if job is None:
            self._settled = True
            return False
        made = run_job(job)
        at = self._parts.index(job.segments[0])
        self._parts[at : at + len(job.segments)] = [made] if made else []
        return True

    def sync(self) -> None:
        if self._open:
            self._open[1].sync()

    def close(self) -> None:
        if self._open:
            self._open[1].close()
            self._open = None

    def _segment(self) -> RowFile:
        if self._open is None:
            assert self._header is not None
            self._open = open_segment(self._folder, self._header, max_rows=self._bounds.segment_rows)
            # The newest file of an earlier attach counted as a part until now.
            self._parts = [part for part in self._parts if part.segment != self._open[0]]
        return self._open[1]

    def _end_segment(self) -> None:
        if self._open is None:
            return
        where, file = self._open
        file.sync()
        file.close()
        self._parts.append(ClosedSegment(where, file.header, file.rows, file.size))
        self._open = None
        self._settled = False


def _parts(folder: Path) -> list[ClosedSegment]:
    found = []
    for one in list_segments(folder, "layers"):
        try:
            header, start, rows = read_header(one.path)
        except BadHeader:
            continue
        if "verdict" in (header.dtype.names or ()):  # another schema's rows are left as they are
            found.append(ClosedSegment(one, header, rows, start + rows * header.dtype.itemsize))
    return found
