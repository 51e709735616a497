"""The bytes of a log, read once from front to back: a file, a pipe, or either of them compressed."""

from __future__ import annotations

import gzip
import io
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

from surefoot.logs.table import Unreadable

HEAD = 1 << 16
"""Bytes from the start by which a format is told."""
LONGEST = 1 << 20
"""Bytes of one line; what is beyond comes as lines of their own."""
WHOLE = 1 << 28
"""Bytes up to which a document that has to be in memory as a whole is read."""
_GZIP = b"\x1f\x8b"


class Source:
    """One log as a stream of bytes; `head` may be looked at before anything is read."""

    def __init__(self, stream: BinaryIO, path: str) -> None:
        self.path = path
        self._stream = stream
        self.head = _filled(stream, HEAD)
        if self.head.startswith(_GZIP):
            self._stream = cast(BinaryIO, gzip.GzipFile(fileobj=_Rest(self.head, stream)))
            self.head = self._guarded(lambda: _filled(self._stream, HEAD))
        self._rest = _Rest(self.head, self._stream)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Source:
        """A file, or `-` for what is piped in."""
        name = os.fspath(path)
        if name == "-":
            return cls(sys.stdin.buffer, "-")
        file = Path(name)
        try:
            if file.exists() and not file.is_file() and not file.is_fifo():
                raise Unreadable(f"{name} is neither a file nor a folder")
            return cls(file.open("rb"), name)
        except FileNotFoundError:
            raise Unreadable(f"{name} is not there. Pass a log, a checkpoint, a folder, or - for a pipe") from None
        except (OSError, ValueError) as error:
            raise error if isinstance(error, Unreadable) else Unreadable(f"{name} cannot be read: {error}") from None

    def lines(self) -> Iterator[bytes]:
        """Line after line, with its end; a line ends at a newline alone, not at a carriage return."""
        stream = io.BufferedReader(self._rest, 1 << 18)
        while line := self._guarded(lambda: stream.readline(LONGEST)):
            yield line

    def chunks(self, size: int = 1 << 20) -> Iterator[bytes]:
        while chunk := self._guarded(lambda: self._rest.read(size)):
            yield chunk

    def whole(self) -> bytes:
        """Everything, for formats that cannot be read in parts."""
        parts: list[bytes] = []
        size = 0
        for chunk in self.chunks():
            parts.append(chunk)
            size += len(chunk)
            if size > WHOLE:
                raise Unreadable(
                    f"{self.path} is one document of more than {WHOLE >> 20} MiB, which has to be read as a whole."
                    " Write one record a line (JSONL), or cut out the part with the losses"
                )
        return b"".join(parts)

    def close(self) -> None:
        if self.path != "-":
            self._stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _guarded(self, read: Callable[[], bytes]) -> bytes:
        try:
            return read()
        except (OSError, EOFError, zlib.error) as error:
            raise Unreadable(f"{self.path} cannot be read on: {error}") from None


class _Rest(io.RawIOBase):
    """What was looked at already, then the stream behind it."""

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


def _filled(stream: BinaryIO, size: int) -> bytes:
    """The first bytes, as many as asked for unless there are no more: a pipe hands them over in small pieces."""
    parts: list[bytes] = []
    while size > 0 and (part := stream.read(size)):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
