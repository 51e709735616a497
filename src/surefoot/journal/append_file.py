"""Append-only files, written without a buffer so that every write survives the death of the process."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_FSYNC_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}


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
