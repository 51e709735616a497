"""Writes W&B run files for tests."""

from __future__ import annotations

import json
import struct
import zlib

from eventfiles import field, varint

BLOCK = 1 << 15
HISTORY, SUMMARY, CONFIG, STATS, OUTPUT, RUN, EXIT = 2, 3, 5, 7, 13, 17, 18


def file(*records: bytes) -> bytes:
    """Records in blocks of 32 KiB, split where they do not fit."""
    out = bytearray(b":W&B" + struct.pack("<HB", 0xBEE1, 0))
    for record in records:
        first, remaining = True, record
        while first or remaining:
            free = BLOCK - len(out) % BLOCK
            if free < 7:
                out += b"\0" * free
                free = BLOCK
            part, remaining = remaining[: free - 7], remaining[free - 7 :]
            kind = (1 if first else 4) if not remaining else (2 if first else 3)
            out += struct.pack("<IHB", zlib.crc32(bytes([kind]) + part), len(part), kind) + part
            first = False
    return bytes(out)


def item(name: str | tuple[str, ...], value: object) -> bytes:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    names = field(1, name.encode()) if isinstance(name, str) else b"".join(field(2, part.encode()) for part in name)
    return field(1, names + field(16, raw))


def history(values: dict[str | tuple[str, ...], object], step: int | None = None) -> bytes:
    items = b"".join(item(name, value) for name, value in values.items())
    return field(HISTORY, items + (b"" if step is None else field(2, b"\x08" + varint(step))))


def steps(count: int) -> list[bytes]:
    return [history({"_step": n, "train/loss": 5 - n / 100}) for n in range(count)]


def printed(words: str) -> bytes:
    return field(OUTPUT, field(3, words.encode()))


def ended(code: int) -> bytes:
    return field(EXIT, b"\x08" + varint(code) if code else b"")
