"""Rows and events to bytes in the files they belong to; knows nothing of queues, threads and locks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path

import numpy as np

from surefoot.journal.append import AppendFile, open_line_file
from surefoot.journal.layers import LayerWriter
from surefoot.journal.row_file import SCALARS_HEADER, RowFile
from surefoot.journal.run_json import SIGNALS_DIR, events_filename
from surefoot.journal.segments import open_segment
from surefoot.records import LAYER_STATS, StepMetrics

_values = attrgetter(*(f.name for f in fields(StepMetrics)))


class RowWriter:
    """Owns the open files of one journal; every OSError goes up to it. Files are opened when first written to."""

    def __init__(self, run_dir: Path, *, rank: int, window: int, budget: int) -> None:
        self._run_dir, self.rank = run_dir, rank
        self._events: AppendFile | None = None
        self._scalars: RowFile | None = None
        self._layers = LayerWriter(run_dir / SIGNALS_DIR, window=window, budget=budget) if rank == 0 else None
        self.unwritable = 0
        """Rows, or the layers of rows, that held what no file of ours can hold."""

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
        scalars, stats = self._encoded(rows)
        self._scalars.append(scalars)
        shape = (self._layers.tensors, len(LAYER_STATS))
        measured = [at for at, found in enumerate(stats) if found is not None]
        fitting = {at: found for at, found in enumerate(stats) if found is not None and found.shape == shape}
        self.unwritable += len(measured) - len(fitting)
        if fitting and self._layers.tensors:
            self._layers.append(scalars[list(fitting)], list(fitting.values()))

    def thin(self, jobs: int) -> None:
        """Thin some of the old layer rows."""
        for _ in range(jobs):
            if self._layers is None or not self._layers.thin_once():
                return

    def sync(self) -> None:
        for file in (self._events, self._scalars, self._layers):
            if file is not None:
                file.sync()

    def close(self) -> None:
        for file in (self._events, self._scalars, self._layers):
            if file is not None:
                file.close()

    def _encoded(
        self, rows: Sequence[tuple[StepMetrics, np.ndarray | None]]
    ) -> tuple[np.ndarray, list[np.ndarray | None]]:
        encoded = _as_array([row for row, _ in rows])
        if encoded is None:  # one row holds a value that is no number: the others must not go with it
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
