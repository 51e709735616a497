"""File system access of the store, and what notices that a disk hangs.

Every call goes through `Files.do`, where it is timed, and where a test can make it fail or crash.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, TypeVar, cast

import xxhash

from surefoot.checkpoint.store.failures import SaveFailed

T = TypeVar("T")

READS = frozenset({"open", "read"})
"""Operations passed to `do` that change nothing."""
_WRITE_CHUNK = 1 << 25
"""Bytes of a tensor per call that is timed."""
_NO_FOLDER_FLUSH = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF})
# Do not follow links, and do not block on a pipe that somebody put there.
_READING = os.O_RDONLY | sum(getattr(os, flag, 0) for flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))


@dataclass(frozen=True, slots=True)
class FileEntry:
    """The size in bytes and the xxh3-128 (hex digits) that a file must have."""

    size: int
    xxh3_128: str


class Files:
    """File operations, each one a call of `do`."""

    chunk = 1 << 20
    """Bytes per read or write call; one megabyte stays in the CPU cache between reading and hashing."""

    def do(self, what: str, path: Path, act: Callable[[], T]) -> T:
        """Call `act`, which performs the operation `what` on `path`."""
        return act()

    def mkdir(self, path: Path) -> None:
        self.do("mkdir", path, lambda: os.mkdir(path))

    def write(self, path: Path, data: bytes) -> None:
        """Create a file with this content, and fsync it."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        fd = self.do("create", path, lambda: os.open(path, flags, 0o644))
        try:
            view = memoryview(data)
            while view:
                part = view[: self.chunk]
                view = view[self.do("write", path, lambda part=part: os.write(fd, part)) :]
            self.do("flush", path, lambda: os.fsync(fd))
        finally:
            os.close(fd)

    def flush(self, path: Path) -> None:
        """Fsync a file that anyone wrote."""
        fd = os.open(path, (os.O_RDWR | getattr(os, "O_BINARY", 0)) if os.name == "nt" else _READING)
        try:
            self.do("flush", path, lambda: os.fsync(fd))
        finally:
            os.close(fd)

    def flush_folder(self, path: Path) -> None:
        """Fsync the names in a folder, where the system supports it."""
        if os.name == "nt":
            return
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self.do("flush folder", path, lambda: os.fsync(fd))
        except OSError as error:
            if error.errno not in _NO_FOLDER_FLUSH:
                raise
        finally:
            os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        self.do("rename", new, lambda: os.rename(old, new))

    def replace(self, old: Path, new: Path) -> None:
        self.do("rename", new, lambda: os.replace(old, new))

    def unlink(self, path: Path) -> None:
        self.do("unlink", path, lambda: path.unlink(missing_ok=True))

    def remove_tree(self, folder: Path) -> None:
        """Remove a folder and its content without following links; what is already gone is fine."""
        try:
            with os.scandir(folder) as entries:
                children = [(Path(entry.path), entry.is_dir(follow_symlinks=False)) for entry in entries]
            for path, is_folder in children:
                if is_folder:
                    self.remove_tree(path)
                else:
                    self.unlink(path)
            self.do("rmdir", folder, lambda: os.rmdir(folder))
        except FileNotFoundError:
            pass

    def hash(self, path: Path, *, cold: bool = False, progress: Callable[[int], None] | None = None) -> FileEntry:
        """Read a file and return its size and hash; `cold` drops the page cache first, to read what the disk holds."""
        buffer = memoryview(bytearray(self.chunk))
        digest, size = xxhash.xxh3_128(), 0
        fd = self.do("open", path, lambda: os.open(path, _READING))
        with open(fd, "rb", buffering=0) as stream:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "not a plain file", str(path))
            if cold and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            while count := self.do("read", path, lambda: stream.readinto(buffer)):
                digest.update(buffer[:count])
                size += count
                if progress is not None:
                    progress(count)
        return FileEntry(size, digest.hexdigest())

    def free(self, folder: Path) -> int:
        """Free bytes on the file system of `folder`."""
        return shutil.disk_usage(folder).free


def hash_file(path: Path) -> FileEntry:
    """Size and xxh3-128 of a file."""
    return Files().hash(path)


def flush_and_hash(folder: Path, names: list[str], files: Files | None = None) -> dict[str, FileEntry]:
    """Fsync the files that a rank wrote, and return their entries for `CheckpointStore.commit`."""
    files = files or Files()
    for name in names:
        files.flush(folder / name)
    return {name: files.hash(folder / name) for name in names}


# -- a disk that hangs: calls are timed while they run, and a save is abandoned when one of them stalls


class WriteAbandoned(Exception):
    """The disk responded again after the save was abandoned: no further call may be made for it."""


class WatchedFiles(Files):
    """Forwards every call and records when the last one returned; after `abandon` it forwards none."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self.chunk = files.chunk
        self.last_call = ("begin", Path())
        self.since = time.monotonic()
        self._abandoned = threading.Event()

    def abandon(self) -> None:
        self._abandoned.set()

    def do(self, what: str, path: Path, act: Callable[[], T]) -> T:
        if self._abandoned.is_set():
            raise WriteAbandoned
        self.last_call, self.since = (what, path), time.monotonic()
        try:
            return self._files.do(what, path, act)
        finally:
            self.since = time.monotonic()

    def free(self, folder: Path) -> int:
        return self._files.free(folder)


def run_with_stall_timeout(failure: str, files: WatchedFiles, stall_timeout: float, work: Callable[[], T]) -> T:
    """Run `work` in a thread; raise SaveFailed, with a message that begins with `failure`, once a call has stalled.

    A thread that hangs in a system call cannot be ended. When it wakes up, its next call raises WriteAbandoned and it
    cleans up.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    finished = threading.Event()

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)
        finally:
            finished.set()

    threading.Thread(target=run, name="surefoot-save", daemon=True).start()
    while not finished.wait(max(0.01, files.since + stall_timeout - time.monotonic())):
        if time.monotonic() - files.since >= stall_timeout:
            files.abandon()
            what, path = files.last_call
            raise SaveFailed(
                f"{failure}: checkpoint write has stalled for {stall_timeout:g} s ({what} {path})",
                kind="hangs",
            )
    if errors:
        raise errors[0]
    return results[0]


class WriteWatch:
    """Times the file call that is in progress, if any."""

    def __init__(self) -> None:
        self._started: float | None = None

    def call_started(self) -> None:
        self._started = time.monotonic()

    def call_ended(self) -> None:
        self._started = None

    @property
    def stalled_seconds(self) -> float:
        """Seconds since the current call started; 0 when none is in progress."""
        started = self._started
        return 0.0 if started is None else time.monotonic() - started


class WatchedFile:
    """A new file for tensors; each call goes through `Files.do` and is timed by a WriteWatch."""

    def __init__(self, path: Path, files: Files, watch: WriteWatch) -> None:
        self._path, self._files, self._watch = path, files, watch
        self._file: Any = self._do("create", lambda: path.open("xb", buffering=0))

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        rest = view
        while len(rest):
            rest = rest[self._write(rest[:_WRITE_CHUNK]) :]
        return len(view)

    def _write(self, chunk: memoryview) -> int:
        return self._do("write", lambda: self._file.write(chunk))

    def flush(self) -> None:
        self._do("flush", lambda: os.fsync(self._file.fileno()))

    def fileno(self) -> int:
        return self._file.fileno()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _do(self, what: str, act: Any) -> Any:
        self._watch.call_started()
        try:
            return self._files.do(what, self._path, act)
        finally:
            self._watch.call_ended()


def watched_opener(files: Files, watch: WriteWatch) -> Callable[[Path], BinaryIO]:
    """A function that creates WatchedFiles."""
    return lambda path: cast(BinaryIO, WatchedFile(path, files, watch))
