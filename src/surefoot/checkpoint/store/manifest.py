"""The manifest of a checkpoint: what belongs to it, and a seal in which every byte of the manifest itself counts."""

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

from surefoot.checkpoint.store.failures import Damage, Problem
from surefoot.checkpoint.store.files import Entry

SCHEMA = 1
NAME = "manifest.json"
MARK = "health.json"
_LARGEST = 1 << 26
_LONGEST_NAME = 1024
_SEAL = re.compile(rb',\n "hash": "([0-9a-f]{32})"\n}\n\Z')
_SEAL_SIZE = len(',\n "hash": ""\n}\n') + 32
_HEX = re.compile(r"[0-9a-f]{32}")
_DEEPEST = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself."""

    step: int
    attempt: int
    about: Mapping[str, Any]
    files: Mapping[str, Entry]
    seal: str = ""
    """The hash at its end: no two manifests share it."""

    def as_bytes(self) -> bytes:
        files = {name: {"size": e.size, "xxh3_128": e.xxh3_128} for name, e in sorted(self.files.items())}
        content = {"surefoot": "checkpoint", "schema": SCHEMA, "step": self.step, "attempt": self.attempt}
        return sealed({**content, "about": plain(self.about), "files": files})


def sealed(content: Mapping[str, Any]) -> bytes:
    """JSON that ends in a hash of all that stands before it."""
    head = json.dumps(content, indent=1, allow_nan=False)[:-2].encode("ascii")
    return head + f',\n "hash": "{xxhash.xxh3_128_hexdigest(head)}"\n}}\n'.encode("ascii")


def unsealed(data: bytes, file: str) -> tuple[dict[str, Any], str]:
    """What `sealed` was given, and the hash; raises Damage."""
    seal = _SEAL.search(data[-_SEAL_SIZE:])
    if seal is None or xxhash.xxh3_128_hexdigest(data[:-_SEAL_SIZE]).encode() != seal[1]:
        raise Damage(_newer(data, file) or Problem(file, "its content does not match the hash at its end"))
    content = _parsed(data, file)
    if content.get("schema") != SCHEMA:
        raise Damage(_newer(data, file) or Problem(file, "it names no schema that surefoot knows"))
    return content, seal[1].decode()


def _parsed(data: bytes, file: str) -> dict[str, Any]:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Damage(Problem(file, f"it is no JSON that can be read ({str(error)[:80]})")) from None
    if not isinstance(content, dict):
        raise Damage(Problem(file, "it is JSON, but not a table"))
    return content


def _newer(data: bytes, file: str) -> Problem | None:
    """A later version may lay out, and seal, its manifest in another way; that is no damage."""
    try:
        schema = _parsed(data, file).get("schema")
    except Damage:
        return None
    if not isinstance(schema, int) or not SCHEMA < schema < 1000:
        return None
    words = f"it was written by a newer surefoot (schema {schema}, this one reads {SCHEMA}). Update surefoot to load it"
    return Problem(file, words, foreign=True)


def read(folder: Path) -> Manifest:
    """The manifest in a folder, checked; raises Damage."""
    content, seal = unsealed(read_small(folder, NAME), NAME)
    step, attempt, about, files = (content.get(key) for key in ("step", "attempt", "about", "files"))
    if not (_counts(step) and _counts(attempt) and isinstance(about, dict) and isinstance(files, dict)):
        raise Damage(Problem(NAME, "its step, attempt, about or files are missing or of the wrong kind"))
    entries = {name: _entry(name, told) for name, told in files.items()}
    return Manifest(step=step, attempt=attempt, about=about, files=entries, seal=seal)


def read_small(folder: Path, name: str) -> bytes:
    """A small file of our own in a checkpoint, never through a link; raises Damage."""
    path = folder / name
    try:
        if path.is_symlink() or not path.is_file():
            raise Damage(
                Problem(name, "is a link or no plain file" if path.is_symlink() or path.exists() else "missing")
            )
        if (size := path.stat().st_size) > _LARGEST:
            raise Damage(Problem(name, f"its {size:,} bytes are far more than a manifest needs"))
        return path.read_bytes()
    except OSError as error:
        raise Damage(Problem(name, f"cannot be read: {error.strerror or error}")) from None


def _entry(name: str, told: Any) -> Entry:
    if not safe_name(name):
        raise Damage(Problem(NAME, f"it names a file outside of its folder, or of its own: {name[:100]!r}"))
    size = told.get("size") if isinstance(told, dict) else None
    digits = told.get("xxh3_128") if isinstance(told, dict) else None
    if not _counts(size) or not isinstance(digits, str) or not _HEX.fullmatch(digits):
        raise Damage(Problem(NAME, f"size or hash of {name[:100]!r} are missing or of the wrong kind"))
    return Entry(size, digits)


def _counts(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def safe_name(name: str) -> bool:
    """Whether a file of this name lies in the folder, whatever the system, and is none of the store's own."""
    parts = name.split("/")
    odd = any(part in ("", ".", "..") or part.endswith((" ", ".")) for part in parts)
    plain_letters = name.isprintable() and not set(name) & set('\\:*?"<>|') and len(name) <= _LONGEST_NAME
    return plain_letters and not odd and parts[0] not in (NAME, MARK) and not parts[0].startswith(".marking-")


def plain(value: Any, depth: int = 0) -> Any:
    """The same in nothing but what JSON holds: a number that is not finite becomes its name, an object its words."""
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _plain_number(value)
    if depth < _DEEPEST and isinstance(value, Mapping):
        return {str(key): plain(item, depth + 1) for key, item in value.items()}
    if depth < _DEEPEST and isinstance(value, list | tuple | set | frozenset):
        return [plain(item, depth + 1) for item in value]
    return value if value is None or isinstance(value, bool | str) else str(value)[:500]


def _plain_number(value: float) -> Any:
    if isinstance(value, int):
        return int(value) if value.bit_length() < 1024 else f"<int of {value.bit_length()} bits>"
    return float(value) if math.isfinite(value) else str(float(value))
