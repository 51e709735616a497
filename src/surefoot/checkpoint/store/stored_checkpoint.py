"""One checkpoint folder as found on disk: its name, manifest and health mark, and what is wrong with its files."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import stat
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, cast

from surefoot.checkpoint.store import manifest
from surefoot.checkpoint.store.failures import DamagedFile, Problem
from surefoot.checkpoint.store.files import FileEntry, Files
from surefoot.process_identity import is_running, pid_scope, start_time

Health = Literal["healthy", "unproven", "suspect"]
_NUM_READERS = 4
_PARALLEL_BYTES = 1 << 26
"""Checkpoint size from which files are read in parallel."""
_DAMAGED_MARK = "its health mark is damaged and was ignored"
_CHECKPOINT = re.compile(r"step-(\d{8,19})(?:-attempt-(\d{8,19})(?:-(\d{1,9}))?)?")
_TEMPORARY = re.compile(r"\.(writing|marking|removing)-.*-([0-9a-f]{12})-(\d{1,10})-(\d{1,19})-[0-9a-f]{16}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """One checkpoint on disk."""

    folder: Path
    step: int
    attempt: int
    about: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    seal: str = ""
    health: Health = "unproven"
    reason: str = ""
    """Why it was marked healthy or suspect."""
    problems: tuple[Problem, ...] = ()
    """What is wrong with it, as far as it was checked."""
    extra: tuple[str, ...] = ()
    """Files that do not belong to it; they are never read."""
    skipped: tuple[str, ...] = ()
    """Newer checkpoints that were skipped in favour of this one, and why."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def kind(self) -> str:
        return str(self.about.get("kind", "regular"))

    @property
    def size(self) -> int:
        """Total bytes of its files."""
        return sum(entry.size for entry in self.files.values())

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key by training progress: step, attempt, repeat count. Never by a clock."""
        parsed = parse_name(self.name)
        return (self.step, self.attempt, parsed[2] if parsed else 0)

    @property
    def newer_version(self) -> bool:
        """Whether a newer surefoot wrote it."""
        return any(problem.newer_version for problem in self.problems)


def read_checkpoint(folder: Path) -> StoredCheckpoint:
    """Read the manifest and check file sizes, without reading file content; damage is reported, never raised."""
    parsed = parse_name(folder.name)
    assert parsed is not None, f"{folder.name} is not the name of a checkpoint"
    step, attempt, _ = parsed
    try:
        content = manifest.read_manifest(folder)
        _check_folder_name(folder, content, step, attempt)
    except DamagedFile as damage:
        return StoredCheckpoint(folder=folder, step=step, attempt=attempt or 0, problems=(damage.problem,))
    checkpoint = StoredCheckpoint(
        folder=folder,
        step=content.step,
        attempt=content.attempt,
        about=content.about,
        files=content.files,
        seal=content.seal,
    )
    checks = (_check_without_reading(folder, name, entry) for name, entry in checkpoint.files.items())
    problems = tuple(problem for problem in checks if problem)
    return replace(checkpoint, problems=problems, extra=_unknown_files(folder, checkpoint.files))


def verify_files(
    checkpoint: StoredCheckpoint, files: Files, *, cold: bool = False, progress: Callable[[int], None] | None = None
) -> StoredCheckpoint:
    """Read every byte of every file and compare hashes; returns the checkpoint with the problems found."""

    def check(item: tuple[str, FileEntry]) -> Problem | None:
        name, entry = item
        try:
            actual = files.hash(checkpoint.folder / name, cold=cold, progress=progress)
        except OSError as error:
            return Problem(name, f"cannot be read: {error.strerror or error}")
        if actual.size != entry.size:
            return Problem(name, _size_mismatch(actual.size, entry.size))
        return None if actual == entry else Problem(name, "content has changed: its hash does not match the manifest")

    damaged = {problem.file for problem in checkpoint.problems}
    if manifest.NAME in damaged:
        return checkpoint
    unchecked = [(name, entry) for name, entry in checkpoint.files.items() if name not in damaged]
    if checkpoint.size < _PARALLEL_BYTES or len(unchecked) < 2:
        results = [check(item) for item in unchecked]
    else:
        with ThreadPoolExecutor(_NUM_READERS) as pool:
            results = list(pool.map(check, unchecked))
    return replace(checkpoint, problems=(*checkpoint.problems, *(problem for problem in results if problem)))


def fingerprint(checkpoint: StoredCheckpoint) -> tuple[tuple[int, int, int], ...] | None:
    """Inode, size and mtime of each file: changes when somebody writes to one. None if a file cannot be read."""
    try:
        stats = [os.lstat(checkpoint.folder / name) for name in (manifest.NAME, *sorted(checkpoint.files))]
    except OSError:
        return None
    return tuple((s.st_ino, s.st_size, s.st_mtime_ns) for s in stats)


def _check_folder_name(folder: Path, content: manifest.Manifest, step: int, attempt: int | None) -> None:
    if content.step != step or attempt not in (None, content.attempt):
        what = f"it belongs to step {content.step}, attempt {content.attempt}, but lies in {folder.name}"
        raise DamagedFile(Problem(manifest.NAME, what))


def _check_without_reading(folder: Path, name: str, entry: FileEntry) -> Problem | None:
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
    return None if size == entry.size else Problem(name, _size_mismatch(size, entry.size))


def _size_mismatch(actual: int, expected: int) -> str:
    return f"has {actual:,} bytes instead of {expected:,}"


def _unknown_files(folder: Path, known: Mapping[str, FileEntry]) -> tuple[str, ...]:
    names = {path.relative_to(folder).as_posix() for path in list_files(folder)}
    names -= {*known, manifest.NAME, manifest.MARK}
    return tuple(sorted(name for name in names if temp_kind(name) != "marking"))


def list_files(folder: Path) -> list[Path]:
    """All files and links below a folder; links are not followed."""
    paths: list[Path] = []
    for parent, subfolders, names in os.walk(folder):
        paths += [Path(parent, name) for name in names]
        paths += [path for name in subfolders if (path := Path(parent, name)).is_symlink()]
    return paths


# -- health marks: a small file beside the manifest, which itself is never rewritten


def write_mark(checkpoint: StoredCheckpoint, health: Health, reason: str, files: Files) -> None:
    """Write or replace the health mark atomically."""
    mark = {"surefoot": "health", "schema": manifest.SCHEMA, "health": health, "why": reason[:2000]}
    draft = checkpoint.folder / temp_name("marking")
    try:
        files.write(draft, manifest.seal_json({**mark, "of": checkpoint.seal}))
        files.replace(draft, checkpoint.folder / manifest.MARK)
    except OSError:
        with suppress(OSError):  # otherwise the next cleanup removes it
            files.unlink(draft)
        raise
    files.flush_folder(checkpoint.folder)


def with_mark(checkpoint: StoredCheckpoint) -> StoredCheckpoint:
    """Apply the health mark; a mark that is damaged or belongs to another checkpoint leaves it unproven."""
    if not (checkpoint.folder / manifest.MARK).exists() or not checkpoint.seal:
        return checkpoint
    try:
        mark, _ = manifest.unseal_json(manifest.read_small(checkpoint.folder, manifest.MARK), manifest.MARK)
    except DamagedFile:
        return replace(checkpoint, reason=_DAMAGED_MARK)
    health, reason = mark.get("health"), mark.get("why")
    if mark.get("of") != checkpoint.seal or health not in ("healthy", "suspect") or not isinstance(reason, str):
        return replace(checkpoint, reason=_DAMAGED_MARK)
    return replace(checkpoint, health=cast("Health", health), reason=reason)


# -- names of folders


def parse_name(name: str) -> tuple[int, int | None, int] | None:
    """Step, attempt and repeat count from a checkpoint's folder name; None for other names."""
    match = _CHECKPOINT.fullmatch(name)
    if match is None:
        return None
    step, attempt, repeat = match.groups()
    return int(step), None if attempt is None else int(attempt), int(repeat or attempt is not None)


def free_name(taken: Collection[str], step: int, attempt: int) -> str:
    """An unused folder name that sorts after all others of the same step and attempt."""
    name = f"step-{step:08d}"
    if name not in taken and not any(other.startswith(name + "-") for other in taken):
        return name
    name += f"-attempt-{attempt:08d}"
    if name not in taken and not any(other.startswith(name + "-") for other in taken):
        return name
    repeats = [parsed[2] for other in taken if (parsed := parse_name(other)) and parsed[:2] == (step, attempt)]
    return f"{name}-{max(repeats, default=1) + 1}"


def temp_name(kind: str, about: str = "") -> str:
    """A temporary name, unique across processes and hosts, that identifies the process that made it."""
    return f".{kind}-{about or 'it'}-{_process_id(os.getpid())}-{secrets.token_hex(8)}"


def temp_kind(name: str) -> str | None:
    """writing, marking or removing; None for a name that `temp_name` did not make."""
    match = _TEMPORARY.fullmatch(name)
    return match and match[1]


def owner_is_running(name: str) -> bool | None:
    """Whether the process that made a temporary name still runs; None if it cannot be checked from this host."""
    match = _TEMPORARY.fullmatch(name)
    if match is None or match[2] != _host_id():
        return None
    return is_running(int(match[3]), int(match[4]))


def is_mine(name: str) -> bool:
    """Whether this process made the temporary name."""
    match = _TEMPORARY.fullmatch(name)
    pid = os.getpid()
    return match is not None and match.groups()[1:] == (_host_id(), str(pid), str(start_time(pid) or 0))


@cache
def _process_id(pid: int) -> str:
    """What a temporary name says of this process; after a fork the pid is another one."""
    host = re.sub(r"[^A-Za-z0-9]", "", pid_scope()["host"])[:24] or "host"
    return f"{host}-{_host_id()}-{pid}-{start_time(pid) or 0}"


@cache
def _host_id() -> str:
    return hashlib.sha256(repr(sorted(pid_scope().items())).encode()).hexdigest()[:12]
