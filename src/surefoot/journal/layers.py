"""The per-layer rows of a run: full for the newest, thinner the older, and never more than the budget on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from surefoot.journal.row_file import BadHeader, Header, RowFile, layers_header, look
from surefoot.journal.segments import Segment, listed, resume_or_start
from surefoot.journal.thinning import Bounds, Part, carry_out, next_job


class LayerLog:
    """Appends layer rows and thins old ones, one small job at a time.

    The last `window` rows stay in full and older ones ever thinner, so a million steps of 300 tensors and their scalars
    stay under 1 GB; rows of updates that did not land are spared. The bound of `budget` bytes comes first: with over a
    thousand tensors the full window shrinks, and where refused updates alone would break it they are thinned as well.
    """

    def __init__(self, folder: Path, *, window: int, budget: int) -> None:
        self._folder, self._window, self._budget = folder, window, budget
        self._header: Header | None = None
        self._bounds = Bounds(window=window, chunk=1, budget=budget)
        self._parts = _parts(folder)
        self._open: tuple[Segment, RowFile] | None = None
        self._settled = False

    @property
    def tensors(self) -> int:
        """How many tensors the rows must have; 0 before a layout is known."""
        return len(self._header.names) if self._header else 0

    def layout(self, names: Sequence[str], numels: Sequence[int]) -> None:
        header = layers_header(names, numels)
        if header == self._header:
            return
        self._end_segment()
        self._header = header
        self._bounds = Bounds.fitting(header.dtype.itemsize, window=self._window, budget=self._budget)

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
            room = self._bounds.chunk - file.rows
            file.append(rows[:room])
            rows = rows[room:]
            if file.rows >= self._bounds.chunk:
                self._end_segment()

    def tidy(self) -> bool:
        """Do one job of thinning; False when there is none left."""
        if self._settled or self._header is None:
            return False
        newer, growing = (self._open[1].rows, self._open[1].size) if self._open else (0, 0)
        job = next_job(self._parts, self._bounds, newer=newer, growing=growing)
        if job is None:
            self._settled = True
            return False
        made = carry_out(job)
        at = self._parts.index(job.parts[0])
        self._parts[at : at + len(job.parts)] = [made] if made else []
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
            self._open = resume_or_start(self._folder, self._header, most=self._bounds.chunk)
            # The newest file of an earlier attach counted as a part until now.
            self._parts = [part for part in self._parts if part.segment != self._open[0]]
        return self._open[1]

    def _end_segment(self) -> None:
        if self._open is None:
            return
        where, file = self._open
        file.sync()
        file.close()
        self._parts.append(Part(where, file.header, file.rows, file.size))
        self._open = None
        self._settled = False


def _parts(folder: Path) -> list[Part]:
    found = []
    for one in listed(folder, "layers"):
        try:
            header, start, rows = look(one.path)
        except BadHeader:
            continue
        if "verdict" in (header.dtype.names or ()):  # another schema's rows are left as they are
            found.append(Part(one, header, rows, start + rows * header.dtype.itemsize))
    return found
