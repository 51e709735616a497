"""A checkpoint on disk as it is found: what it says of itself, and what is wrong with it."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from surefoot.checkpoint.store import folder_names, manifest
from surefoot.checkpoint.store.failures import Damage, Problem
from surefoot.checkpoint.store.files import Entry, Files

Health = Literal["healthy", "unproven", "suspect"]
_AT_ONCE = 4
_LARGE = 1 << 26
"""Bytes from which on several files are read at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """One checkpoint."""

    folder: Path
    step: int
    attempt: int
    about: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, Entry] = field(default_factory=dict)
    seal: str = ""
    health: Health = "unproven"
    why: str = ""
    """What was said when it was marked healthy or suspect."""
    wrong: tuple[Problem, ...] = ()
    """What was found to be wrong, as far as it was looked at."""
    extra: tuple[str, ...] = ()
    """Files that do not belong to it; nobody reads them."""
    passed: tuple[str, ...] = ()
    """Newer checkpoints that were passed over for this one, and why."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def kind(self) -> str:
        return str(self.about.get("kind", "regular"))

    @property
    def size(self) -> int:
        """Bytes of all its files together."""
        return sum(entry.size for entry in self.files.values())

    @property
    def order(self) -> tuple[int, int, int]:
        """The later in training, the larger: by step, then attempt, then how often that was saved. Never by a clock."""
        found = folder_names.parsed(self.name)
        return (self.step, self.attempt, found[2] if found else 0)

    @property
    def foreign(self) -> bool:
        """Whether a newer surefoot wrote it."""
        return any(problem.foreign for problem in self.wrong)


def found(folder: Path) -> StoredCheckpoint:
    """A checkpoint by its manifest and the sizes of its files; their content is not read. Never raises for damage."""
    told = folder_names.parsed(folder.name)
    assert told is not None, f"{folder.name} is no name of a checkpoint"
    step, attempt, _ = told
    try:
        known = manifest.read(folder)
        _same_place(folder, known, step, attempt)
    except Damage as damage:
        return StoredCheckpoint(folder=folder, step=step, attempt=attempt or 0, wrong=(damage.problem,))
    kept = StoredCheckpoint(
        folder=folder,
        step=known.step,
        attempt=known.attempt,
        about=known.about,
        files=known.files,
        seal=known.seal,
    )
    wrong = tuple(problem for name, entry in kept.files.items() if (problem := _outside(folder, name, entry)))
    return replace(kept, wrong=wrong, extra=_extra(folder, kept.files))


def verified(
    kept: StoredCheckpoint, files: Files, *, cold: bool = False, progress: Callable[[int], None] | None = None
) -> StoredCheckpoint:
    """The same, with every byte of every file read and compared."""

    def look(item: tuple[str, Entry]) -> Problem | None:
        name, entry = item
        try:
            now = files.entry(kept.folder / name, cold=cold, progress=progress)
        except OSError as error:
            return Problem(name, f"cannot be read: {error.strerror or error}")
        if now.size != entry.size:
            return Problem(name, _sizes(now.size, entry.size))
        return None if now == entry else Problem(name, "its content has changed: the hash is not the one it had")

    already = {problem.file for problem in kept.wrong}
    if manifest.NAME in already:
        return kept
    todo = [(name, entry) for name, entry in kept.files.items() if name not in already]
    if kept.size < _LARGE or len(todo) < 2:
        looked = [look(item) for item in todo]
    else:
        with ThreadPoolExecutor(_AT_ONCE) as several:
            looked = list(several.map(look, todo))
    return replace(kept, wrong=(*kept.wrong, *(problem for problem in looked if problem)))


def fingerprint(kept: StoredCheckpoint) -> tuple[tuple[int, int, int], ...] | None:
    """What changes when somebody writes to one of the files; None when one cannot be looked at."""
    try:
        looks = [os.lstat(kept.folder / name) for name in (manifest.NAME, *sorted(kept.files))]
    except OSError:
        return None
    return tuple((look.st_ino, look.st_size, look.st_mtime_ns) for look in looks)


def _same_place(folder: Path, known: manifest.Manifest, step: int, attempt: int | None) -> None:
    if known.step != step or attempt not in (None, known.attempt):
        words = f"it is the one of step {known.step}, attempt {known.attempt}, and lies in {folder.name}"
        raise Damage(Problem(manifest.NAME, words))


def _outside(folder: Path, name: str, entry: Entry) -> Problem | None:
    """What can be told without reading a file."""
    try:
        for parent in [folder / name, *(folder / name).parents]:
            if parent == folder:
                break
            mode = os.lstat(parent).st_mode
            if stat.S_ISLNK(mode):
                return Problem(name, "is a link, or lies behind one")
            if parent == folder / name and not stat.S_ISREG(mode):
                return Problem(name, "is not a plain file")
        size = os.lstat(folder / name).st_size
    except FileNotFoundError:
        return Problem(name, "missing")
    except OSError as error:
        return Problem(name, f"cannot be read: {error.strerror or error}")
    return None if size == entry.size else Problem(name, _sizes(size, entry.size))


def _sizes(now: int, then: int) -> str:
    return f"has {now:,} bytes instead of {then:,}"


def _extra(folder: Path, known: Mapping[str, Entry]) -> tuple[str, ...]:
    there = {path.relative_to(folder).as_posix() for path in plain_files(folder)}
    ours = {manifest.NAME, manifest.MARK}
    return tuple(sorted(name for name in there - set(known) - ours if folder_names.kind_of(name) != "marking"))


def plain_files(folder: Path) -> list[Path]:
    """All that lies in a folder and below and is no folder itself; links are not followed."""
    inside: list[Path] = []
    for where, folders, here in os.walk(folder):
        inside += [Path(where, name) for name in here]
        inside += [path for name in folders if (path := Path(where, name)).is_symlink()]
    return inside
