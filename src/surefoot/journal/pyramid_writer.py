"""Writes the pyramid of a run behind its rows; a kill leaves it some rows behind, which the next writer catches up."""

from __future__ import annotations

import bisect
import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from surefoot.journal.pyramid import (
    FACTOR,
    LAYER_WIDTH,
    LEVELS,
    SCALAR_WIDTH,
    BucketStack,
    PyramidInput,
    bucket_header,
    layer_input,
    scalar_header,
    scalar_input,
)
from surefoot.journal.row_file import BadHeader, RowFile, RowHeader, load_rows, read_header
from surefoot.journal.segments import list_segments

log = logging.getLogger("surefoot")
_NAME = re.compile(r"pyramid-(scalars|layers)-(\d{6})-(\d)\.bin")
_MAX_PARTS = 64
"""Parts of one pyramid: a new one begins when the columns or tensors change; beyond these no more is written."""
_CHUNK = 16_384
"""Rows read at once while catching up."""


def pyramid_path(folder: Path, kind: str, part: int, level: int) -> Path:
    return folder / f"pyramid-{kind}-{part:06d}-{level}.bin"


def pyramid_parts(folder: Path, kind: str) -> list[int]:
    """The numbers of the parts of a pyramid, oldest first."""
    matches = [_NAME.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted({int(match[2]) for match in matches if match and match[1] == kind and match[3] == "0"})


class PyramidWriter:
    """Appends the complete buckets of one kind of rows to one file per level.

    An error ends it and nothing else: a reader sums up the rows itself where buckets are missing.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder, self._kind = folder, kind
        self._stack: BucketStack | None = None
        self._files: list[RowFile | None] = []
        self._part = 0
        self._source: RowHeader | None = None
        self._header = scalar_header()
        self.failed = False

    def begin(self, source: RowHeader) -> None:
        """Continue the pyramid of rows with this header, or begin a new part; call it before rows are appended."""
        self._guarded(lambda: self._begin(source))

    def add(self, rows: np.ndarray) -> None:
        """Take in rows that were written."""
        if self._stack is not None and self._source is not None:
            source = self._source
            self._guarded(lambda: self._add(self._input(source, rows)))

    def sync(self) -> None:
        for file in self._files:
            if file is not None:
                self._guarded(file.sync)

    def close(self) -> None:
        for file in self._files:
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()
        self._files = []
        self._stack = None

    def _guarded(self, work: Callable[[], None]) -> None:
        if self.failed:
            return
        try:
            work()
        except Exception as error:
            self.failed = True
            self.close()
            log.warning(
                "surefoot: the pyramid of %s is no longer written, surefoot watch will open this run more slowly;"
                " training and the journal go on: %r",
                self._kind,
                error,
            )

    def _begin(self, source: RowHeader) -> None:
        scalars = self._kind == "scalars"
        header = scalar_header() if scalars else bucket_header("layers", source.names)
        if self._stack is not None and header != self._header:
            self._append(0, self._stack.open[0])  # these tensors end here
        self.close()
        self._source, self._header = source, header
        stack = BucketStack(header, SCALAR_WIDTH if scalars else LAYER_WIDTH)
        parts = pyramid_parts(self._folder, self._kind)
        self._files = [None] * LEVELS
        continues = bool(parts) and self._header_of(parts[-1]) == header
        self._part = parts[-1] if continues else (parts[-1] + 1 if parts else 0)
        if self._part >= _MAX_PARTS:
            self.failed = True
            return
        if continues:
            self._restore(stack)
        elif parts:  # rows before belong to the part before
            stack.after = self._last_attempt(parts[-1])
        self._stack = stack
        for rows in self._recorded(stack.after):
            self._add(self._input(source, rows))

    def _header_of(self, part: int) -> RowHeader | None:
        with contextlib.suppress(BadHeader, OSError):
            return read_header(pyramid_path(self._folder, self._kind, part, 0))[0]
        return None

    def _last_attempt(self, part: int) -> int:
        with contextlib.suppress(BadHeader, OSError):
            last = load_rows(pyramid_path(self._folder, self._kind, part, 0), last=1)[1]
            return int(last["attempt"][-1]) if len(last) else -1
        return -1

    def _restore(self, stack: BucketStack) -> None:
        """The open buckets as they were: what the level below has after the last complete bucket of each level."""
        below = np.zeros(0, stack.header.dtype)
        for level in range(LEVELS):
            path = pyramid_path(self._folder, self._kind, self._part, level)
            width = stack.width * FACTOR**level
            # A level holds at most FACTOR buckets of the next one that are not complete, unless a kill came between.
            entries = load_rows(path, last=4 * FACTOR)[1] if path.exists() else np.zeros(0, stack.header.dtype)
            end = (int(entries["first"][-1]) // width + 1) * width if len(entries) else 0
            if level == 0:
                stack.after = end - 1
            else:
                missing = stack.push(level, below[below["first"] >= end])
                self._append(level, missing)
                entries = np.concatenate((entries, missing))
            below = entries

    def _recorded(self, after: int) -> Iterator[np.ndarray]:
        """Rows on disk that are not in complete buckets, oldest first."""
        assert self._source is not None
        for segment in list_segments(self._folder, self._kind):
            with contextlib.suppress(BadHeader, FileNotFoundError):
                header, start, count = read_header(segment.path)
                if header.layout != self._source.layout or not count:
                    continue
                size = header.dtype.itemsize
                chunk = max(1, min(_CHUNK, (1 << 25) // size))
                with segment.path.open("rb") as file:
                    rows = _RowsOnDisk(file, header.dtype, start, count)
                    first = bisect.bisect_right(rows, after)
                    file.seek(start + first * size)
                    for at in range(first, count, chunk):
                        yield np.frombuffer(file.read(min(chunk, count - at) * size), header.dtype)

    def _input(self, source: RowHeader, rows: np.ndarray) -> PyramidInput:
        return scalar_input(rows) if self._kind == "scalars" else layer_input(source, rows)

    def _add(self, rows: PyramidInput) -> None:
        assert self._stack is not None
        for level, entries in enumerate(self._stack.add(rows)):
            self._append(level, entries)

    def _append(self, level: int, entries: np.ndarray) -> None:
        if not len(entries):
            return
        file = self._files[level]
        if file is None:
            path = pyramid_path(self._folder, self._kind, self._part, level)
            file = self._files[level] = RowFile(path, self._header)
        file.append(entries)


class _RowsOnDisk:
    """The attempts of the rows of an open file, read one by one: a memory map would kill training on a broken disk."""

    def __init__(self, file: BinaryIO, dtype: np.dtype, start: int, count: int) -> None:
        self._file, self._start, self._count, self._size = file, start, count, dtype.itemsize
        self._offset = (dtype.fields or {})["attempt"][1]

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: int) -> int:
        self._file.seek(self._start + at * self._size + self._offset)
        return int.from_bytes(self._file.read(8), "little", signed=True)
