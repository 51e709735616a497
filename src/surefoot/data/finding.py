"""Files, folders and patterns of a recipe to a list of files, the same one in the same order for everyone."""

from __future__ import annotations

import difflib
import glob
from collections.abc import Sequence
from pathlib import Path

from surefoot.data.problem import DataError

ENDINGS = {"text": (), "tokens": (".bin", ".npy"), "chat": (".jsonl",)}
"""What is taken from a folder, of each kind; of text everything."""


def find_files(kind: str, patterns: Sequence[str], *, setting: str = "data.path") -> list[Path]:
    """The files that are meant, sorted within each pattern, none twice; hidden ones are left out of folders."""
    if not patterns:
        raise DataError(f"data.kind {kind} needs {setting}: files, folders or patterns such as 'texts/**/*.txt'")
    found: dict[Path, Path] = {}
    for pattern in patterns:
        for path in _matches(kind, pattern, setting):
            found.setdefault(path.resolve(), path)
    return list(found.values())


def _matches(kind: str, pattern: str, setting: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        inside = _within(path, ENDINGS[kind])
        if not inside:
            wanted = f" that ends in {' or '.join(ENDINGS[kind])}" if ENDINGS[kind] else ""
            raise DataError(
                f"{setting}: the folder {pattern} has no file{wanted} in it: put data there or name another"
            )
        return inside
    if path.exists():
        return [path]
    if glob.has_magic(pattern):
        matches = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
        if files := [match for match in matches if match.is_file()]:
            return files
        raise DataError(f"{setting}: no file matches {pattern!r}, looked for from {Path.cwd()}")
    raise DataError(f"{setting}: there is no file or folder {pattern}, looked for from {Path.cwd()}{_near(path)}")


def _within(folder: Path, endings: tuple[str, ...]) -> list[Path]:
    def wanted(path: Path) -> bool:
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        return not hidden and path.is_file() and (not endings or path.suffix in endings)

    return sorted(path for path in folder.rglob("*") if wanted(path))


def _near(path: Path) -> str:
    try:
        close = difflib.get_close_matches(path.name, [other.name for other in path.parent.iterdir()], n=1)
    except OSError:
        return ""
    return f". Did you mean {path.parent / close[0]}?" if close else ""
