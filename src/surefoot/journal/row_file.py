"""Files of fixed-width binary rows behind a one-line JSON header that describes the columns; and appending to files.

Files are written without a buffer, so that every write survives the death of the process.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from surefoot.records import LAYER_STATS, SCHEMA, StepMetrics

_FORMAT = "surefoot-signals"
_NUMERIC_DTYPE = re.compile(r"\|[iu]1|<[iu][248]|<f[248]")
_ALIGN = 64
_FSYNC_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}
_MAX_HEADER_BYTES = 1 << 28
_DTYPE_BY_NAME = {"step": "<i8", "attempt": "<i8", "time": "<f8"}
_DTYPE_BY_TYPE = {"int": "<i4", "Verdict": "|i1", "JudgedBy": "|i1"}


class BadHeader(ValueError):
    """A signals file whose header is torn or was not written by surefoot."""


class EmptyFile(BadHeader):
    """A signals file without content, as it is for a moment after its creation."""


@dataclass(frozen=True, kw_only=True)
class RowHeader:
    """Describes the rows of one file: their columns and, for layers, the tensors and how far they were thinned.

    The field names are the JSON keys on disk.
    """

    kind: str
    columns: tuple[tuple[str, str, tuple[int, ...]], ...]
    names: tuple[str, ...] = ()
    numels: tuple[int, ...] = ()
    stats: tuple[str, ...] = ()
    landed_stride: int = 1
    """One in how many rows of applied updates was kept."""
    refused_stride: int = 1
    covers: int = 0
    """How many rows were recorded here before thinning; 0 as long as none was dropped."""
    schema: int = SCHEMA

    @cached_property
    def dtype(self) -> np.dtype:
        return np.dtype([(name, code, shape) if shape else (name, code) for name, code, shape in self.columns])

    @property
    def layout(self) -> tuple[Any, ...]:
        """Two files can be merged when their layouts are equal."""
        return (self.kind, self.schema, self.columns, self.names, self.numels, self.stats)

    def encode(self) -> bytes:
        line = json.dumps({"format": _FORMAT} | {f.name: getattr(self, f.name) for f in fields(self)}).encode("ascii")
        return line + b" " * (-(len(line) + 1) % _ALIGN) + b"\n"

    @classmethod
    def decode(cls, line: bytes) -> RowHeader:
        try:
            raw = json.loads(line)
            if not line.endswith(b"\n") or raw.pop("format") != _FORMAT:
                raise BadHeader("not a surefoot signals header")
            known = {f.name for f in fields(cls)}
            header = cls(**{key: _frozen(value) for key, value in raw.items() if key in known})
            return _checked(header)
        except BadHeader:
            raise
        except Exception as error:  # a damaged file may contain anything
            raise BadHeader(f"unreadable header ({type(error).__name__})") from error


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _checked(header: RowHeader) -> RowHeader:
    # Only numbers: a header from an untrusted file must not make NumPy build objects.
    if not all(_NUMERIC_DTYPE.fullmatch(code) for _, code, _ in header.columns):
        raise BadHeader("column types that surefoot never writes")
    strides = (header.landed_stride, header.refused_stride)
    if not all(isinstance(stride, int) and stride >= 1 for stride in strides) or header.covers < 0:
        raise BadHeader("impossible strides")
    shapes = {name: shape for name, _, shape in header.columns}
    if header.dtype.itemsize < 1 or not {"step", "attempt"} <= shapes.keys():
        raise BadHeader("rows without step and attempt")
    shape = (len(header.names), len(header.stats))
    if header.kind == "layers" and (shapes["stats"] != shape or len(header.numels) != len(header.names)):
        raise BadHeader("tensor names do not match the columns")
    return header


def _scalar_columns() -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    return tuple(
        (f.name, _DTYPE_BY_NAME.get(f.name) or _DTYPE_BY_TYPE.get(str(f.type), "<f4"), ()) for f in fields(StepMetrics)
    )


SCALARS_HEADER = RowHeader(kind="scalars", columns=_scalar_columns())
"""The fields of `StepMetrics`; a value beyond the float32 range is written as infinite."""


def layers_header(names: Sequence[str], numels: Sequence[int]) -> RowHeader:
    """Rows of step, attempt, verdict (thinning keeps refused updates) and the statistics of every tensor."""
    assert len(names) == len(numels), "every tensor has a name and a size"
    shape = (len(names), len(LAYER_STATS))
    columns = (("step", "<i8", ()), ("attempt", "<i8", ()), ("verdict", "<i4", ()), ("stats", "<f4", shape))
    return RowHeader(
        kind="layers",
        columns=columns,
        names=tuple(str(name) for name in names),
        numels=tuple(int(numel) for numel in numels),
        stats=LAYER_STATS,
    )


def _read_header(file: BinaryIO) -> tuple[RowHeader, int, int]:
    """Header, start and number of rows, all from one open file: thinning may replace the path meanwhile."""
    status = os.fstat(file.fileno())
    if status.st_size == 0 or not stat.S_ISREG(status.st_mode):
        raise EmptyFile("empty file")
    line = file.readline(_MAX_HEADER_BYTES)
    header = RowHeader.decode(line)
    return header, len(line), (status.st_size - len(line)) // header.dtype.itemsize


def read_header(path: Path) -> tuple[RowHeader, int, int]:
    """The header of a file, the offset of its rows, and their number without a torn last one; raises BadHeader."""
    with path.open("rb") as file:
        return _read_header(file)


def map_rows(path: Path) -> tuple[RowHeader, np.ndarray]:
    """All complete rows of a file, memory-mapped read-only; for readers."""
    with path.open("rb") as file:
        header, start, rows = _read_header(file)
        if rows == 0:
            return header, np.empty(0, header.dtype)
        return header, np.asarray(np.memmap(file, header.dtype, mode="r", offset=start, shape=(rows,)))


def load_rows(path: Path, *, last: int | None = None) -> tuple[RowHeader, np.ndarray]:
    """The complete rows of a file, or the `last` of them, read into memory.

    For the writer: on a failing disk a read raises OSError, but a memory map raises SIGBUS and kills the training.
    """
    with path.open("rb") as file:
        header, start, rows = _read_header(file)
        count = rows if last is None else min(rows, last)
        file.seek(start + (rows - count) * header.dtype.itemsize)
        return header, np.frombuffer(file.read(count * header.dtype.itemsize), header.dtype)


class RowFile:
    """One signals file open for appending; a torn row left by a kill is cut off first."""

    def __init__(self, path: Path, header: RowHeader) -> None:
        self.header = header
        self.rows = self._start = 0
        if file_size(path):
            existing, self._start, self.rows = read_header(path)
            assert existing == header, f"{path} holds other columns"
            if self.size != file_size(path):
                os.truncate(path, self.size)
        self._file = AppendFile(path)
        if self._start == 0:
            line = header.encode()
            self._file.write(line)
            self._start = len(line)

    @property
    def path(self) -> Path:
        return self._file.path

    @property
    def size(self) -> int:
        return self._start + self.rows * self.header.dtype.itemsize

    def append(self, rows: np.ndarray) -> None:
        assert rows.dtype == self.header.dtype
        self._file.write(rows.tobytes())
        self.rows += len(rows)

    def sync(self) -> None:
        self._file.sync()

    def close(self) -> None:
        self._file.close()


# -- append-only files


class AppendFile:
    """An open file to which whole records are appended; every OSError names the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
        self._dirty = False

    def write(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._dirty = True

    def sync(self) -> None:
        """Flush to disk, where the file system supports fsync."""
        if not self._dirty:
            return
        try:
            os.fsync(self._fd)
        except OSError as error:
            if error.errno not in _FSYNC_UNSUPPORTED:
                raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._dirty = False

    def close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)


def open_line_file(path: Path) -> AppendFile:
    """Open a file of lines; a torn last line from a failed write is ended first, so that the next line stays intact."""
    torn = file_size(path) > 0 and read_tail(path, 1) != b"\n"
    file = AppendFile(path)
    if torn:
        file.write(b"\n")
    return file


def file_size(path: Path) -> int:
    """Bytes in a regular file; 0 for a missing one and for devices and pipes, which must not be read."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def read_tail(path: Path, size: int) -> bytes:
    """The last `size` bytes of a file, or all of it if it is shorter."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        return file.read(size)


def write_atomically(path: Path, *chunks: bytes) -> None:
    """Replace the file at `path` so that every reader sees the old or the new content, never a part."""
    draft = path.with_name(path.name + ".tmp")
    try:
        draft.unlink(missing_ok=True)
        file = AppendFile(draft)
        try:
            for chunk in chunks:
                file.write(chunk)
            file.sync()
        finally:
            file.close()
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
