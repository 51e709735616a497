"""Writes TensorBoard event files for tests."""

from __future__ import annotations

import struct


def _entry(crc: int) -> int:
    for _ in range(8):
        crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc


_TABLE = [_entry(byte) for byte in range(256)]


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked(length) + data + _masked(data)


def _masked(data: bytes) -> bytes:
    crc = 0xFFFFFFFF
    for byte in data[:10_000]:  # what is longer is not checked
        crc = _TABLE[(crc ^ byte) & 255] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def varint(number: int) -> bytes:
    number &= (1 << 64) - 1
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def event(step: int, *values: bytes, wall: float = 1.7e9) -> bytes:
    summary = b"".join(field(1, value) for value in values)
    return record(b"\x09" + struct.pack("<d", wall) + (b"\x10" + varint(step) if step else b"") + field(5, summary))


def simple(tag: str, value: float) -> bytes:
    """A scalar as written by PyTorch and TensorFlow 1."""
    return field(1, tag.encode()) + b"\x15" + struct.pack("<f", value)


def tensor(tag: str, dtype: int, content: bytes, plugin: str = "scalars") -> bytes:
    """A scalar as written by TensorFlow 2: a 0-d tensor and its plugin name."""
    body = b"\x08" + varint(dtype) + field(2, b"") + content
    return field(1, tag.encode()) + field(8, body) + field(9, field(1, field(1, plugin.encode())))


def opening(wall: float = 1.7e9) -> bytes:
    return record(b"\x09" + struct.pack("<d", wall) + field(3, b"brain.Event:2"))
