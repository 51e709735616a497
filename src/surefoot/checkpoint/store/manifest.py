"""The manifest of a checkpoint: its files with sizes and hashes, and a seal that covers every byte of the manifest."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeGuard

import xxhash

from surefoot.checkpoint.store.failures import DamagedFile, Problem
from surefoot.checkpoint.store.files import FileEntry

SCHEMA = 1
NAME = "manifest.json"
MARK = "health.json"
_MAX_BYTES = 1 << 26
_MAX_NAME_LENGTH = 1024
_SEAL = re.compile(rb',\n "hash": "([0-9a-f]{32})"\n}\n\Z')
_SEAL_SIZE = len(',\n "hash": ""\n}\n') + 32
_HEX = re.compile(r"[0-9a-f]{32}")
_MAX_DEPTH = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The content of a manifest."""

    step: int
    attempt: int
    about: Mapping[str, Any]
    files: Mapping[str, FileEntry]
    seal: str = ""
    """The hash at its end, unique to this manifest."""

    def as_bytes(self) -> bytes:
        files = {name: {"size": e.size, "xxh3_128": e.xxh3_128} for name, e in sorted(self.files.items())}
        content = {"surefoot": "checkpoint", "schema": SCHEMA, "step": self.step, "attempt": self.attempt}
        return seal_json({**content, "about": to_json_values(self.about), "files": files})


def seal_json(content: Mapping[str, Any]) -> bytes:
    """JSON that ends with a hash of everything before it."""
    head = json.dumps(content, indent=1, allow_nan=False)[:-2].encode("ascii")
    return head + f',\n "hash": "{xxhash.xxh3_128_hexdigest(head)}"\n}}\n'.encode("ascii")


def unseal_json(data: bytes, file: str) -> tuple[dict[str, Any], str]:
    """The content passed to `seal_json`, and the hash; raises DamagedFile."""
    seal = _SEAL.search(data[-_SEAL_SIZE:])
    if seal is None or xxhash.xxh3_128_hexdigest(data[:-_SEAL_SIZE]).encode() != seal[1]:
        raise DamagedFile(_newer(data, file) or Problem(file, "its content does not match the hash at its end"))
    content = _parse(data, file)
    if content.get("schema") != SCHEMA:
        raise DamagedFile(_newer(data, file) or Problem(file, "its schema is unknown to surefoot"))
    return content, seal[1].decode()


def _parse(data: bytes, file: str) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(Problem(file, f"is not valid JSON ({str(error)[:80]})")) from None
    if not isinstance(content, dict):
        raise DamagedFile(Problem(file, "is JSON, but not an object"))
    return content


def _newer(data: bytes, file: str) -> Problem | None:
    """The problem if a later version wrote it: that may use another layout or seal, which is no damage."""
    try:
        schema = _parse(data, file).get("schema")
    except DamagedFile:
        return None
    if not isinstance(schema, int) or not SCHEMA < schema < 1000:
        return None
    what = f"written by a newer surefoot (schema {schema}; this version reads {SCHEMA}). Update surefoot to load it"
    return Problem(file, what, newer_version=True)


def read_manifest(folder: Path) -> Manifest:
    """Read and validate the manifest in a folder; raises DamagedFile."""
    content, seal = unseal_json(read_small(folder, NAME), NAME)
    step, attempt, about, files = (content.get(key) for key in ("step", "attempt", "about", "files"))
    if not (_is_count(step) and _is_count(attempt) and isinstance(about, dict) and isinstance(files, dict)):
        raise DamagedFile(Problem(NAME, "its step, attempt, about or files are missing or of the wrong type"))
    entries = {name: _file_entry(name, values) for name, values in files.items()}
    return Manifest(step=step, attempt=attempt, about=about, files=entries, seal=seal)


def read_small(folder: Path, name: str) -> bytes:
    """Read one of the store's own small files, never through a link; raises DamagedFile."""
    path = folder / name
    try:
        if path.is_symlink() or not path.is_file():
            exists = path.is_symlink() or path.exists()
            raise DamagedFile(Problem(name, "is a link or not a plain file" if exists else "missing"))
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise DamagedFile(Problem(name, f"its {size:,} bytes are far more than a manifest needs"))
        return path.read_bytes()
    except OSError as error:
        raise DamagedFile(Problem(name, f"cannot be read: {error.strerror or error}")) from None


def _file_entry(name: str, values: Any) -> FileEntry:
    if not safe_name(name):
        raise DamagedFile(
            Problem(NAME, f"it lists a file outside its folder, or one of the store's own: {name[:100]!r}")
        )
    size = values.get("size") if isinstance(values, dict) else None
    digits = values.get("xxh3_128") if isinstance(values, dict) else None
    if not _is_count(size) or not isinstance(digits, str) or not _HEX.fullmatch(digits):
        raise DamagedFile(Problem(NAME, f"size or hash of {name[:100]!r} is missing or of the wrong type"))
    return FileEntry(size, digits)


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def safe_name(name: str) -> bool:
    """Whether a file of this name lies inside the folder on every system, and is none of the store's own."""
    parts = name.split("/")
    odd = any(part in ("", ".", "..") or part.endswith((" ", ".")) for part in parts)
    plain_letters = name.isprintable() and not set(name) & set('\\:*?"<>|') and len(name) <= _MAX_NAME_LENGTH
    return plain_letters and not odd and parts[0] not in (NAME, MARK) and not parts[0].startswith(".marking-")


def to_json_values(value: Any, depth: int = 0) -> Any:
    """Convert to values that JSON holds: a non-finite number becomes its name, any other object its `str`."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _to_json_number(value)
    if depth < _MAX_DEPTH and isinstance(value, Mapping):
        return {str(key): to_json_values(item, depth + 1) for key, item in value.items()}
    if depth < _MAX_DEPTH and isinstance(value, list | tuple | set | frozenset):
        return [to_json_values(item, depth + 1) for item in value]
    return value if value is None or isinstance(value, bool | str) else str(value)[:500]


def _to_json_number(value: float) -> Any:
    if isinstance(value, int):
        return int(value) if value.bit_length() < 1024 else f"<int of {value.bit_length()} bits>"
    return float(value) if math.isfinite(value) else str(float(value))
