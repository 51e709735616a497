"""TFRecord framing of TensorBoard event files: length, its checksum, data, its checksum; damage is skipped.

The checksum of every length is verified, and that of the data of every record up to 4 KiB, which scalars are. After an
invalid length the reader searches for the next valid one and counts the gap.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cache

import numpy as np
from numpy.typing import NDArray

from surefoot.logs.formats.log_source import LogSource
from surefoot.logs.table import TableBuilder

HEADER_BYTES = 12
FRAME_BYTES = 16
"""Bytes of a record besides its data."""
MAX_RECORD_BYTES = 1 << 22
"""Larger records are images or graphs, not scalars, and are not kept in memory."""
_MAX_CHECKED_BYTES = 1 << 12
_LENGTH = struct.Struct("<Q").unpack_from
Whole = NDArray[np.int64]


class TfRecordReader:
    """Yields the complete records of one file, chunk by chunk, as offsets into the bytes."""

    def __init__(self, builder: TableBuilder) -> None:
        self.any_record = False
        """Whether anything in the file was a record."""
        self._builder = builder
        self._searching = False
        """Whether the next record has to be searched for."""
        self._bytes_to_skip = 0
        """Bytes to come that belong to an oversized record."""

    def read(self, source: LogSource) -> Iterator[tuple[bytes, list[int], list[int]]]:
        """Yield the bytes, and the start and size of each record's data in them."""
        rest = b""
        for chunk in source.chunks(1 << 21):
            if self._bytes_to_skip >= len(chunk):
                self._bytes_to_skip -= len(chunk)
                continue
            data, self._bytes_to_skip = rest + chunk[self._bytes_to_skip :], 0
            at = 0
            while at >= 0:
                starts, sizes, at = _find_frames(data, at)
                if len(starts):
                    self.any_record = True
                    yield data, *self._valid_records(data, starts, sizes)
                if at == len(data) or self._is_incomplete(data, at):
                    break
                at = next_record(data, at)
            self._searching = at < 0
            rest = b"" if self._bytes_to_skip else data[at if at >= 0 else -HEADER_BYTES :]
        self._note_end(rest)

    def _valid_records(self, data: bytes, starts: Whole, sizes: Whole) -> tuple[list[int], list[int]]:
        good = _valid_data(data, starts, sizes)
        if not good.all():
            self._builder.skip("records with a wrong checksum", int((~good).sum()))
            starts, sizes = starts[good], sizes[good]
        return (starts + HEADER_BYTES).tolist(), sizes.tolist()

    def _is_incomplete(self, data: bytes, at: int) -> bool:
        """Whether the record at `at` is valid so far and only its end is still to come."""
        if len(data) - at < HEADER_BYTES:
            return not self._searching
        if not is_record_at(data, at):
            if not self._searching and data[at : at + 4096].strip(b"\0"):
                self._builder.skip("damaged places in the file")
            return False
        size = _LENGTH(data, at)[0]
        if size > MAX_RECORD_BYTES:
            self.any_record = True
            self._builder.skip("records too large for numbers (images, graphs)")
            self._bytes_to_skip = at + size + FRAME_BYTES - len(data)
        return True

    def _note_end(self, rest: bytes) -> None:
        if self._bytes_to_skip or (rest.strip(b"\0") and not self._searching):
            self._builder.skip("records cut off at the end of the file")
        elif rest:
            self._builder.note("the file ends in bytes that are not a record, as after a machine crash")


def is_record_at(data: bytes, at: int) -> bool:
    """Whether a record begins at `at`."""
    return bool(_valid_lengths(data, np.array([at]))[0]) if len(data) - at >= HEADER_BYTES else False


def next_record(data: bytes, at: int) -> int:
    """The offset of the next record from `at` on, or -1; a false hit has a chance of one in four thousand million."""
    for first in range(at, len(data) - HEADER_BYTES + 1, 1 << 16):
        places = np.arange(first, min(first + (1 << 16), len(data) - HEADER_BYTES + 1))
        # The upper half of a length is zero in any real file, so the checksum is computed for few offsets only.
        view = np.frombuffer(data, np.uint8)
        for byte in (7, 6, 5):
            places = places[view[places + byte] == 0]
        hits = places[_valid_lengths(data, places)]
        if len(hits):
            return int(hits[0])
    return -1


def _find_frames(data: bytes, at: int) -> tuple[Whole, Whole, int]:
    """Starts and sizes of consecutive records from `at`, and where they end."""
    starts: list[int] = []
    sizes: list[int] = []
    end = len(data)
    while at + FRAME_BYTES <= end:
        size = _LENGTH(data, at)[0]
        after = at + FRAME_BYTES + size
        if after > end:
            break
        starts.append(at)
        sizes.append(size)
        at = after
    first, lengths = np.array(starts, np.int64), np.array(sizes, np.int64)
    wrong = np.flatnonzero(~_valid_lengths(data, first))
    if len(wrong):
        at = int(first[wrong[0]])
        first, lengths = first[: wrong[0]], lengths[: wrong[0]]
    return first, lengths, at


def _valid_lengths(data: bytes, at: Whole) -> NDArray[np.bool_]:
    return _checksums(data, at, 8) == _read_uint32(data, at + 8)


def _valid_data(data: bytes, starts: Whole, sizes: Whole) -> NDArray[np.bool_]:
    """Mask of records with a valid data checksum, computed for all of one length at once; long ones are not checked."""
    good = np.ones(len(starts), np.bool_)
    for size in np.unique(sizes[sizes <= _MAX_CHECKED_BYTES]).tolist():
        indices = np.flatnonzero(sizes == size)
        at = starts[indices] + HEADER_BYTES
        good[indices] = _checksums(data, at, size) == _read_uint32(data, at + size)
    return good


def _checksums(data: bytes, at: Whole, size: int) -> NDArray[np.uint32]:
    """Masked CRC-32C of `size` bytes at each of the offsets."""
    view, table = np.frombuffer(data, np.uint8), _crc_table()
    sums = np.full(len(at), 0xFFFFFFFF, np.uint32)
    for byte in range(size):
        sums = table[(sums ^ view[at + byte]) & 255] ^ (sums >> np.uint32(8))
    sums = ~sums
    return ((sums >> np.uint32(15)) | (sums << np.uint32(17))) + np.uint32(0xA282EAD8)


def _read_uint32(data: bytes, at: Whole) -> NDArray[np.uint32]:
    view = np.frombuffer(data, np.uint8)
    return np.stack([view[at + byte] for byte in range(4)], axis=1).view("<u4")[:, 0]


@cache
def _crc_table() -> NDArray[np.uint32]:
    values = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        values = np.where(values & 1, (values >> 1) ^ np.uint32(0x82F63B78), values >> 1).astype(np.uint32)
    return values
