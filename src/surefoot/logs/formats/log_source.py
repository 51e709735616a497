"""The bytes of a log, read once from front to back: a file or a pipe, decompressed, with progress reporting."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

from surefoot.logs.log_diagnosis import UnreadableInput

ProgressCallback = Callable[[str, int, int], None]
"""Called with the path, the bytes read since the last call, and the total."""

_callback: ContextVar[ProgressCallback | None] = ContextVar("surefoot-reading", default=None)


@contextmanager
def report_progress(watcher: ProgressCallback) -> Iterator[None]:
    """While this is active, readers report their progress to the callback."""
    before = _callback.set(watcher)
    try:
        yield
    finally:
        _callback.reset(before)


def with_progress(stream: BinaryIO, path: str) -> BinaryIO:
    """The stream, wrapped to report progress if a callback is active."""
    watcher = _callback.get()
    return (
        stream
        if watcher is None
        else cast(BinaryIO, io.BufferedReader(_ProgressStream(stream, path, watcher), 1 << 18))
    )


def progress_counter(path: str) -> Callable[[int, int], None] | None:
    """A function to report bytes done and total, for work that counts its own bytes; None without a callback."""
    watcher = _callback.get()
    if watcher is None:
        return None
    before = 0

    def tell(done: int, size: int) -> None:
        nonlocal before
        watcher(path, done - before, size)
        before = done

    return tell


class _ProgressStream(io.RawIOBase):
    def __init__(self, stream: BinaryIO, path: str, watcher: ProgressCallback) -> None:
        self._stream, self._path, self._callback = stream, path, watcher
        self._size = os.fstat(stream.fileno()).st_size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        data = self._stream.read(len(buffer)) or b""
        buffer[: len(data)] = data
        self._callback(self._path, len(data), self._size)
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()


HEAD_BYTES = 1 << 16
"""First bytes from which a format is detected."""
MAX_LINE_BYTES = 1 << 20
"""Longer lines are split."""
MAX_DOCUMENT_BYTES = 1 << 28
"""Largest document that is read as a whole."""
_DECOMPRESSORS: dict[bytes, Callable[[Any], Any]] = {
    b"\x1f\x8b": lambda stream: gzip.GzipFile(fileobj=stream),
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
}


class LogSource:
    """A log as a stream of bytes, whose `head` can be inspected before anything is read.

    Compressed files are decompressed and UTF-16 (PowerShell's `>`) is converted to UTF-8 on the fly; `decode` turns the
    bytes into text.
    """

    def __init__(self, stream: BinaryIO, path: str) -> None:
        self.path = path
        self.read_error = ""
        """Why reading stopped early, if it did: a truncated archive, a bad disk."""
        self._streams = [stream]
        self._started = False
        self.head = self._read_head(stream)
        for magic, unpack in _DECOMPRESSORS.items():
            if self.head.startswith(magic):
                self.head = self._read_head(unpack(_PushedBack(self.head, self._streams[-1])))
                break
        if encoding := _wide_encoding(self.head):
            self.head = self._read_head(
                cast(BinaryIO, _Utf8Stream(_PushedBack(self.head, self._streams[-1]), encoding))
            )
        self.head = self.head.removeprefix(codecs.BOM_UTF8)
        self._rest = _PushedBack(self.head, self._streams[-1])

    def _read_head(self, stream: BinaryIO) -> bytes:
        if stream is not self._streams[-1]:
            self._streams.append(stream)
        return self._read_or_stop(lambda: _read_fully(stream, HEAD_BYTES))

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> LogSource:
        """Open a file, or standard input for `-`."""
        name = os.fspath(path)
        if name == "-":
            return cls(sys.stdin.buffer, "-")
        file = Path(name)
        try:
            if file.exists() and not file.is_file() and not file.is_fifo():
                raise UnreadableInput(f"{name} is neither a file nor a folder")
            return cls(with_progress(file.open("rb"), name), name)
        except FileNotFoundError:
            raise UnreadableInput(
                f"{name} does not exist. Pass a log, a checkpoint, a folder, or - for a pipe"
            ) from None
        except (OSError, ValueError) as error:
            raise (
                error if isinstance(error, UnreadableInput) else UnreadableInput(f"{name} cannot be read: {error}")
            ) from None

    def lines(self) -> Iterator[bytes]:
        """Yield lines with their newline; a carriage return does not end a line."""
        stream = io.BufferedReader(self._rest, 1 << 18)
        while line := self._read_or_stop(lambda: stream.readline(MAX_LINE_BYTES)):
            yield line

    def chunks(self, size: int = 1 << 20) -> Iterator[bytes]:
        while chunk := self._read_or_stop(lambda: self._rest.read(size)):
            yield chunk

    def blocks(self, size: int = 1 << 20) -> Iterator[bytes]:
        """Yield chunks of whole lines; only the last may lack its newline, and overlong lines are split."""
        parts: list[bytes] = []
        waiting = 0
        for chunk in self.chunks(size):
            end = chunk.rfind(b"\n") + 1
            if not end and waiting + len(chunk) < MAX_LINE_BYTES:
                parts.append(chunk)
                waiting += len(chunk)
                continue
            end = end or len(chunk)
            yield b"".join([*parts, chunk[:end]])
            parts, waiting = [chunk[end:]], len(chunk) - end
        if rest := b"".join(parts):
            yield rest

    def read_all(self) -> bytes:
        """Read everything, for formats that cannot be read in parts."""
        parts: list[bytes] = []
        size = 0
        for chunk in self.chunks():
            parts.append(chunk)
            size += len(chunk)
            self.check_size(size)
        return b"".join(parts)

    def check_size(self, size: int) -> None:
        """Raise if a document that has to be in memory as a whole is too large."""
        if size > MAX_DOCUMENT_BYTES:
            raise UnreadableInput(
                f"{self.path} is one document of more than {MAX_DOCUMENT_BYTES >> 20} MiB, too large to read at once."
                " Write one record per line (JSONL), or extract the part with the losses"
            )

    def close(self) -> None:
        for stream in reversed(self._streams[1:] if self.path == "-" else self._streams):
            stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, series: TracebackType | None
    ) -> None:
        self.close()

    def _read_or_stop(self, read: Callable[[], bytes]) -> bytes:
        """Read; an error after the first bytes ends the log instead of hiding what was read before."""
        try:
            data = read()
        except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
            if not self._started:
                raise UnreadableInput(f"{self.path} cannot be read: {error}") from None
            self.read_error = str(error)
            return b""
        self._started = self._started or bool(data)
        return data


def is_compressed(head: bytes | bytearray) -> bool:
    """Whether bytes start a compressed file that `LogSource` decompresses."""
    return head.startswith(tuple(_DECOMPRESSORS))


def decode(raw: bytes) -> str:
    """Decode as UTF-8, else as cp1252; NUL bytes, which a crash leaves behind, are dropped."""
    if b"\0" in raw:
        raw = raw.replace(b"\0", b"")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("cp1252", "replace")


class _PushedBack(io.RawIOBase):
    """A stream that starts with bytes already read."""

    def __init__(self, head: bytes, stream: BinaryIO) -> None:
        self._head = head
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        if not self._head:
            data = self._stream.read(len(buffer)) or b""
        else:
            data, self._head = self._head[: len(buffer)], self._head[len(buffer) :]
        buffer[: len(data)] = data
        return len(data)


def _read_fully(stream: BinaryIO, size: int) -> bytes:
    """Read `size` bytes unless the stream ends first; a pipe delivers them in small pieces."""
    parts: list[bytes] = []
    while size > 0 and (part := stream.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class _Utf8Stream(io.RawIOBase):
    """Converts UTF-16 or UTF-32 text to UTF-8."""

    def __init__(self, stream: io.RawIOBase, encoding: str) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder(encoding)("replace")
        self._ready = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        while not self._ready:
            raw = self._stream.read(len(buffer)) or b""
            self._ready = self._decoder.decode(raw, final=not raw).encode("utf-8", "replace")
            if not raw:
                break
        data, self._ready = self._ready[: len(buffer)], self._ready[len(buffer) :]
        buffer[: len(data)] = data
        return len(data)


def _wide_encoding(head: bytes) -> str:
    """The UTF-16 or UTF-32 encoding of a text, or an empty string."""
    for mark, encoding in (
        (codecs.BOM_UTF32_LE, "utf-32"),
        (codecs.BOM_UTF32_BE, "utf-32"),
        (codecs.BOM_UTF16_LE, "utf-16"),
        (codecs.BOM_UTF16_BE, "utf-16"),
    ):
        if head.startswith(mark):
            return encoding
    start = head[:256]
    if len(start) < 8 or (len(start) % 2 and len(head) < 256):
        return ""
    low, high = start[::2], start[1::2]
    if not any(high) and all(32 <= byte < 127 or byte in b"\t\r\n" for byte in low):
        return "utf-16-le"
    if not any(low) and all(32 <= byte < 127 or byte in b"\t\r\n" for byte in high):
        return "utf-16-be"
    return ""
