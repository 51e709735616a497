"""A short name for what is in files, to tell whether a run was made of the same data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import xxhash

from surefoot.data.problem import DataError

WHOLE = 1 << 30
"""Up to so many bytes in all, everything is read."""
_CHUNK = 1 << 20
_PROBE = 1 << 16


def fingerprint_files(files: Sequence[Path], *, max_full_bytes: int = WHOLE) -> str:
    """`xxh3:...` of names and content; beyond `whole` bytes `xxh3-sampled:...`, quick however large the files are.

    The sampled kind takes names, sizes, times of change and 64 KiB at the beginning, middle and end of each file: an
    edit is noticed by its time, but a copy on another disk may come out as other data.
    """
    try:
        sizes = [path.stat().st_size for path in files]
        sampled = sum(sizes) > max_full_bytes
        h = xxhash.xxh3_128()
        for path, size in zip(files, sizes, strict=True):
            h.update(f"{path.name}\0{size}\0".encode(errors="surrogateescape"))
            with path.open("rb") as file:
                if sampled:
                    h.update(str(path.stat().st_mtime_ns).encode())
                    _probe(h, file, size)
                else:
                    while chunk := file.read(_CHUNK):
                        h.update(chunk)
    except OSError as error:
        raise DataError(
            f"cannot read {error.filename}: {error.strerror}. Check the file and who may read it."
        ) from None
    return f"{'xxh3-sampled' if sampled else 'xxh3'}:{h.hexdigest()}"


def _probe(h: xxhash.xxh3_128, file: BinaryIO, size: int) -> None:
    for place in (0, size // 2, max(0, size - _PROBE)):
        file.seek(place)
        h.update(file.read(_PROBE))
