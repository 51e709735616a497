"""Files, folders and patterns of a recipe to a sorted list of files, and a fingerprint of their content."""

from __future__ import annotations

import difflib
import glob
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import xxhash

from surefoot.data.data_error import DataError

SUFFIXES = {"text": (), "tokens": (".bin", ".npy"), "chat": (".jsonl",)}
"""Files taken from a folder, by data.kind; all files for text."""
MAX_FULL_BYTES = 1 << 30
"""Up to this many bytes in total, the fingerprint reads everything."""
_CHUNK = 1 << 20
_PROBE = 1 << 16


def find_files(kind: str, patterns: Sequence[str], *, setting: str = "data.path") -> list[Path]:
    """The matching files, sorted within each pattern, without duplicates; hidden files in folders are skipped."""
    if not patterns:
        raise DataError(f"data.kind {kind} needs {setting}: files, folders or patterns such as 'texts/**/*.txt'")
    files: dict[Path, Path] = {}
    for pattern in patterns:
        for path in _matches(kind, pattern, setting):
            files.setdefault(path.resolve(), path)
    return list(files.values())


def _matches(kind: str, pattern: str, setting: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        files = _files_in(path, SUFFIXES[kind])
        if not files:
            wanted = f" that ends in {' or '.join(SUFFIXES[kind])}" if SUFFIXES[kind] else ""
            raise DataError(f"{setting}: the folder {pattern} has no file{wanted}: put data there or name another")
        return files
    if path.exists():
        return [path]
    if glob.has_magic(pattern):
        matches = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
        if files := [match for match in matches if match.is_file()]:
            return files
        raise DataError(f"{setting}: no file matches {pattern!r} (relative to {Path.cwd()})")
    raise DataError(f"{setting}: there is no file or folder {pattern} (relative to {Path.cwd()}){_similar_name(path)}")


def _files_in(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    def wanted(path: Path) -> bool:
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        return not hidden and path.is_file() and (not suffixes or path.suffix in suffixes)

    return sorted(path for path in folder.rglob("*") if wanted(path))


def _similar_name(path: Path) -> str:
    try:
        close = difflib.get_close_matches(path.name, [other.name for other in path.parent.iterdir()], n=1)
    except OSError:
        return ""
    return f". Did you mean {path.parent / close[0]}?" if close else ""


def fingerprint_files(files: Sequence[Path], *, max_full_bytes: int = MAX_FULL_BYTES) -> str:
    """`xxh3:...` of names and content; above `max_full_bytes` in total `xxh3-sampled:...`, fast for any size.

    The sampled kind hashes names, sizes, modification times and 64 KiB at the beginning, middle and end of each file:
    an edit changes the modification time, but a copy on another disk may get another fingerprint.
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
                    _hash_probes(h, file, size)
                else:
                    while chunk := file.read(_CHUNK):
                        h.update(chunk)
    except OSError as error:
        raise DataError(
            f"cannot read {error.filename}: {error.strerror}. Check the file and its permissions."
        ) from None
    return f"{'xxh3-sampled' if sampled else 'xxh3'}:{h.hexdigest()}"


def _hash_probes(h: xxhash.xxh3_128, file: BinaryIO, size: int) -> None:
    for offset in (0, size // 2, max(0, size - _PROBE)):
        file.seek(offset)
        h.update(file.read(_PROBE))
