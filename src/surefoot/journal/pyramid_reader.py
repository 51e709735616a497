"""Reads a pyramid, and follows a run at a cursor: what it has taken in is never read again."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from surefoot.journal.aliases import upgraded_columns
from surefoot.journal.pyramid import (
    FACTOR,
    LAYER_WIDTH,
    LEVELS,
    SCALAR_WIDTH,
    BucketStack,
    PyramidInput,
    bucket_header,
    layer_input,
    merge_entries,
    reduce_rows,
    scalar_header,
    scalar_input,
)
from surefoot.journal.pyramid_writer import pyramid_parts, pyramid_path
from surefoot.journal.row_file import BadHeader, RowHeader, map_rows
from surefoot.journal.segments import list_segments

_CHUNK = 16_384
_MAX_PIECES = 64
_ROWS_PER_ENTRY = 16
"""Up to so many rows for each entry asked for, rows are read and not buckets."""
_Levels = list[list[np.ndarray]]
"""The buckets of each level, in pieces."""


@dataclass(frozen=True, slots=True)
class MappedRows:
    """The rows of one signals file."""

    header: RowHeader
    rows: np.ndarray

    def between(self, first: int, last: int) -> tuple[int, int]:
        """The positions of the rows with attempts `first` to `last`; few pages of the file are read."""
        attempts = self.rows["attempt"]
        return bisect.bisect_left(attempts, first), bisect.bisect_right(attempts, last)


def map_segments(folder: Path, kind: str) -> list[MappedRows]:
    """The files of a kind, oldest first; those that are damaged or vanish meanwhile are left out."""
    mapped = []
    for segment in list_segments(folder, kind):
        with contextlib.suppress(BadHeader, OSError):
            header, rows = map_rows(segment.path)
            if len(rows) and header.kind == kind:
                mapped.append(MappedRows(header, upgraded_columns(rows) if kind == "scalars" else rows))
    return mapped


class PyramidReader:
    """The buckets of one kind of rows, also where no pyramid was written or its end is still missing."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder, self._kind = folder, kind
        self._width = SCALAR_WIDTH if kind == "scalars" else LAYER_WIDTH
        self.names: tuple[str, ...] = scalar_header().names if kind == "scalars" else ()
        self.segments: list[MappedRows] = []
        self.last_attempt = -1
        """The last attempt taken in."""
        self._groups: list[_Levels] = []
        """One for each stored part, and one for each layout that was read live."""
        self._stack: BucketStack | None = None
        self._read_stored()
        self.refresh()

    def refresh(self) -> bool:
        """Take in what was written since; True if there was anything."""
        self.segments = map_segments(self._folder, self._kind)
        grew = False
        for mapped in self.segments:
            start, end = mapped.between(self.last_attempt + 1, 1 << 62)
            for at in range(start, end, _CHUNK):
                self._take_in(mapped.header, mapped.rows[at : min(at + _CHUNK, end)])
                grew = True
        return grew

    def buckets(self, columns: Sequence[int] | None, first: int, last: int, max_buckets: int) -> np.ndarray:
        """The attempts `first` to `last` in at most about `max_buckets` entries, of these columns or of all."""
        width = max(1, (last - first + 1) // max(1, max_buckets))
        level = 0
        while level + 1 < LEVELS and self._width * FACTOR ** (level + 1) <= width:
            level += 1
        entries = self._entries(level, first, last, columns)
        return merge_entries(entries, entries["first"] // max(width, 1)) if len(entries) > max_buckets else entries

    def curve(self, columns: Sequence[int] | None, first: int, last: int, max_entries: int) -> np.ndarray:
        """The same, but single rows as far as there is room for them."""
        count = self.rows_between(first, last)
        if count > _ROWS_PER_ENTRY * max_entries:
            return self.buckets(columns, first, last, max_entries)
        entries = self.rows(columns, first, last)
        return merge_entries(entries, np.arange(count) * max_entries // count) if count > max_entries else entries

    def rows_between(self, first: int, last: int) -> int:
        """How many rows there are of these attempts."""
        return sum(end - start for start, end in (mapped.between(first, last) for mapped in self.segments))

    def rows(self, columns: Sequence[int] | None, first: int, last: int) -> np.ndarray:
        """Each row of these attempts as an entry of its own."""
        parts = []
        for mapped in self.segments:
            start, end = mapped.between(first, last)
            if start < end:
                values = self._input(mapped.header, mapped.rows[start:end])
                dtype = bucket_header(self._kind, self.names).dtype
                parts.append(_select(reduce_rows(values, np.arange(end - start), dtype), columns))
        return np.concatenate(parts) if parts else np.zeros(0, _dtype(self._kind, self.names, columns))

    def _entries(self, level: int, first: int, last: int, columns: Sequence[int] | None) -> np.ndarray:
        """Entries of a level, and where it has none yet those of the levels below."""
        parts: list[np.ndarray] = []
        for group in self._groups:
            begin = first
            for entries_of_level in reversed(group[: level + 1]):
                found = [part for entries in entries_of_level if len(part := _within(entries, begin, last))]
                parts += [_select(part, columns) for part in found]
                if found:
                    begin = max(begin, int(found[-1]["attempt"][-1]) + 1)
        if self._stack is not None:
            parts.append(_select(_within(self._stack.open[0], first, last), columns))
        return np.concatenate(parts) if parts else np.zeros(0, _dtype(self._kind, self.names, columns))

    def _read_stored(self) -> None:
        for part in pyramid_parts(self._folder, self._kind):
            group: _Levels = [[] for _ in range(LEVELS)]
            for level in range(LEVELS):
                with contextlib.suppress(BadHeader, OSError):
                    header, entries = map_rows(pyramid_path(self._folder, self._kind, part, level))
                    if not len(entries) or header.kind != f"pyramid-{self._kind}":
                        continue
                    if level == 0:
                        self._set_names(header.names)
                        # Buckets are complete up to the end of the last one.
                        self.last_attempt = (int(entries["first"][-1]) // self._width + 1) * self._width - 1
                    group[level].append(self._with_names(header.names, entries))
            self._groups.append(group)

    def _set_names(self, names: tuple[str, ...]) -> None:
        if self.names == names:
            return
        before, self.names = self.names, names
        for group in self._groups:
            for entries_of_level in group:
                entries_of_level[:] = [self._with_names(before, entries) for entries in entries_of_level]

    def _with_names(self, names: tuple[str, ...], entries: np.ndarray) -> np.ndarray:
        """The entries with the columns `self.names`; absent ones are NaN."""
        if names == self.names:
            return entries
        changed = np.zeros(len(entries), bucket_header(self._kind, self.names).dtype)
        for field in ("step", "attempt", "first", "time", "rows"):
            changed[field] = entries[field]
        changed["stats"][..., :3] = np.nan
        positions = {name: at for at, name in enumerate(names)}
        shared = [(to, positions[name]) for to, name in enumerate(self.names) if name in positions]
        for to, source in shared:
            changed["stats"][:, to] = entries["stats"][:, source]
        return changed

    def _take_in(self, header: RowHeader, rows: np.ndarray) -> None:
        if self._kind == "layers" and header.names != self.names:
            if self._stack is not None:
                self._groups[-1][0].append(self._stack.open[0])
            self._set_names(header.names)
            self._stack = None
        if self._stack is None:
            self._stack = BucketStack(bucket_header(self._kind, self.names), self._width)
            self._stack.after = self.last_attempt
            self._groups.append([[] for _ in range(LEVELS)])
        complete = self._stack.add(self._input(header, rows))
        for entries_of_level, entries in zip(self._groups[-1], complete, strict=True):
            if len(entries):
                entries_of_level.append(entries)
            if len(entries_of_level) > _MAX_PIECES:
                entries_of_level[:] = [np.concatenate(entries_of_level)]
        self.last_attempt = int(rows["attempt"][-1])

    def _input(self, header: RowHeader, rows: np.ndarray) -> PyramidInput:
        return scalar_input(rows) if self._kind == "scalars" else layer_input(header, rows)


def _within(entries: np.ndarray, first: int, last: int) -> np.ndarray:
    """The buckets that hold any of these attempts."""
    return entries[bisect.bisect_left(entries["attempt"], first) : bisect.bisect_right(entries["first"], last)]


def _select(entries: np.ndarray, columns: Sequence[int] | None) -> np.ndarray:
    if columns is None:
        return np.asarray(entries)
    selected = np.zeros(len(entries), _narrow(entries.dtype, len(columns)))
    for field in ("step", "attempt", "first", "time", "rows"):
        selected[field] = entries[field]
    selected["stats"] = entries["stats"][:, list(columns)]
    return selected


def _dtype(kind: str, names: Sequence[str], columns: Sequence[int] | None) -> np.dtype:
    dtype = bucket_header(kind, names).dtype
    return dtype if columns is None else _narrow(dtype, len(columns))


def _narrow(dtype: np.dtype, columns: int) -> np.dtype:
    """The same entry with another number of columns."""
    shape = dtype["stats"].shape
    return np.dtype([*dtype.descr[:-1], ("stats", "<f4", (columns, shape[1]))])
