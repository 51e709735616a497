"""New bytes of a log as they come: of a file that grows, is cut, rotated or replaced, or of a pipe."""

from __future__ import annotations

import os
import queue
import threading
from pathlib import Path
from typing import BinaryIO

from surefoot.logs.table import UnreadableInput

CHUNK_BYTES = 1 << 22
"""Bytes taken at once."""


class FileTail:
    """Like `tail -F`: goes on with the new file when the old one was put aside."""

    ended = False

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._file: BinaryIO | None = None
        self._place = (0, 0)

    def read(self) -> tuple[bytes, bool]:
        """What is new, and whether it is the start of another file than before."""
        if self._file is None:
            return self._opened(), False
        data = self._file.read(CHUNK_BYTES)
        if data:
            return data, False
        try:
            now = self._path.stat()
        except OSError:
            return b"", False  # put aside; the next one is not there yet
        if (now.st_dev, now.st_ino) == self._place and now.st_size >= self._file.tell():
            return b"", False
        self.close()
        return self._opened(), True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _opened(self) -> bytes:
        try:
            self._file = self._path.open("rb")
            now = os.fstat(self._file.fileno())
            self._place = (now.st_dev, now.st_ino)
            return self._file.read(CHUNK_BYTES)
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise UnreadableInput(f"{self._path} cannot be read: {error.strerror or error}") from None


class PipeTail:
    """What is piped in; a thread reads it, so that nobody waits for a pipe that is silent."""

    def __init__(self, stream: BinaryIO) -> None:
        self.ended = False
        self._pieces: queue.Queue[bytes] = queue.Queue(maxsize=16)
        self._stream = stream
        threading.Thread(target=self._pump, name="surefoot-pipe", daemon=True).start()

    def read(self) -> tuple[bytes, bool]:
        parts: list[bytes] = []
        while not self.ended and sum(map(len, parts)) < CHUNK_BYTES:
            try:
                piece = self._pieces.get_nowait()
            except queue.Empty:
                break
            self.ended = not piece
            parts.append(piece)
        return b"".join(parts), False

    def close(self) -> None:
        """The pipe is its owner's to close."""

    def _pump(self) -> None:
        take = getattr(self._stream, "read1", self._stream.read)
        try:
            while piece := take(1 << 16):
                self._pieces.put(piece)
        except (OSError, ValueError):
            pass  # closed from the other side, or by us at the end
        self._pieces.put(b"")
