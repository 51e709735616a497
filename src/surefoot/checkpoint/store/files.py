"""The disk as the store sees it: each single call goes through one door, where a test can let it fail or crash."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import xxhash

T = TypeVar("T")

READS = frozenset({"open", "read"})
"""What `do` is asked for that changes nothing."""
_NO_FOLDER_FLUSH = frozenset({errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF})
# Never through a link, and never waiting for a pipe that somebody put there.
_READING = os.O_RDONLY | sum(getattr(os, flag, 0) for flag in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))


@dataclass(frozen=True, slots=True)
class Entry:
    """What a file must be: its size in bytes and the xxh3-128 of its content, as hex digits."""

    size: int
    xxh3_128: str


class Files:
    """Plain calls to the system, each of them through `do`."""

    chunk = 1 << 20
    """Bytes read or written by one call; a megabyte stays in the processor's cache between reading and hashing."""

    def do(self, what: str, path: Path, act: Callable[[], T]) -> T:
        """Call `act`, which does `what` to `path`."""
        return act()

    def mkdir(self, path: Path) -> None:
        self.do("mkdir", path, lambda: os.mkdir(path))

    def write(self, path: Path, data: bytes) -> None:
        """A new file with this content, flushed."""
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
        """Have the content of a file that anyone wrote reach the disk."""
        fd = os.open(path, (os.O_RDWR | getattr(os, "O_BINARY", 0)) if os.name == "nt" else _READING)
        try:
            self.do("flush", path, lambda: os.fsync(fd))
        finally:
            os.close(fd)

    def flush_folder(self, path: Path) -> None:
        """Have the names in a folder reach the disk, where the system knows how."""
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
        """A folder with all that is in it, link by link and file by file; what is gone already is fine."""
        try:
            with os.scandir(folder) as found:
                inside = [(Path(item.path), item.is_dir(follow_symlinks=False)) for item in found]
            for path, is_folder in inside:
                if is_folder:
                    self.remove_tree(path)
                else:
                    self.unlink(path)
            self.do("rmdir", folder, lambda: os.rmdir(folder))
        except FileNotFoundError:
            pass

    def entry(self, path: Path, *, cold: bool = False, progress: Callable[[int], None] | None = None) -> Entry:
        """Size and hash of a file as it is read now; `cold` asks for the disk's bytes, not those still in memory."""
        buffer = memoryview(bytearray(self.chunk))
        hashed, size = xxhash.xxh3_128(), 0
        fd = self.do("open", path, lambda: os.open(path, _READING))
        with open(fd, "rb", buffering=0) as stream:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "not a plain file", str(path))
            if cold and hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            while count := self.do("read", path, lambda: stream.readinto(buffer)):
                hashed.update(buffer[:count])
                size += count
                if progress is not None:
                    progress(count)
        return Entry(size, hashed.hexdigest())

    def free(self, folder: Path) -> int:
        """Bytes that may still be written where `folder` is."""
        return shutil.disk_usage(folder).free


def entry_of(path: Path) -> Entry:
    """Size and xxh3-128 of a file, read once from front to end."""
    return Files().entry(path)


def settle(folder: Path, names: list[str], files: Files | None = None) -> dict[str, Entry]:
    """What a rank does with the files it wrote: have them reach the disk and tell what they must be."""
    files = files or Files()
    for name in names:
        files.flush(folder / name)
    return {name: files.entry(folder / name) for name in names}
