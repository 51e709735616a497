"""Protocol buffer wire format, read field by field in place: no schema, no recursion, no copies."""

from __future__ import annotations

from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
"""Wire types: an integer, eight bytes, length-delimited bytes, four bytes."""
_SIGN = 1 << 63


class BadProtobuf(ValueError):
    """The bytes are not a valid message."""


def fields(data: bytes, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """(number, wire type, first, last) of each field; a varint's value is `first`, others are `data[first:last]`."""
    at = start
    while at < end:
        key, at = varint(data, at, end)
        kind = key & 7
        if kind == VARINT:
            value, at = varint(data, at, end)
            yield key >> 3, kind, value, at
            continue
        if kind == BYTES:
            size, at = varint(data, at, end)
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
        else:
            raise BadProtobuf(f"field of unknown kind {kind}")
        if size > end - at:
            raise BadProtobuf("a field is longer than its message")
        yield key >> 3, kind, at, at + size
        at += size


def varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """An integer of seven bits per byte, and the offset after it."""
    value = shift = 0
    while at < end and shift < 70:
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
        shift += 7
    raise BadProtobuf("a number is cut off")


def signed(value: int) -> int:
    """The int64 that a varint encodes."""
    return value - (1 << 64) if value & _SIGN else value


def text(data: bytes, start: int, end: int) -> str:
    return data[start:end].decode("utf-8", "replace")
