"""Folder names in the checkpoint directory, removal of folders, and cleanup of what dead processes left."""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import time
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from pathlib import Path

from surefoot.checkpoint.store.files import Files
from surefoot.process_identity import is_running, pid_scope, start_time

FOREIGN_DRAFT_SECONDS = 24 * 3600.0
"""Seconds without a write after which a draft of another host, whose process cannot be checked, counts as dead."""
_CHECKPOINT = re.compile(r"step-(\d{8,19})(?:-attempt-(\d{8,19})(?:-(\d{1,9}))?)?")
_TEMPORARY = re.compile(r"\.(writing|marking|removing)-.*-([0-9a-f]{12})-(\d{1,10})-(\d{1,19})-[0-9a-f]{16}")


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


def remove_checkpoint(folder: Path, files: Files) -> None:
    """Remove a folder; a checkpoint is renamed first, so that a crash cannot leave half of one under its name."""
    if parse_name(folder.name) is not None:
        hidden = folder.with_name(temp_name("removing", folder.name))
        files.rename(folder, hidden)
        files.flush_folder(folder.parent)
        folder = hidden
    files.remove_tree(folder)


def remove_leftovers(root: Path, files: Files, active_drafts: Collection[str], *, alone: bool) -> list[str]:
    """Remove unfinished drafts, marks and removals of dead processes, and return their names.

    A folder with a checkpoint's name is never removed.
    """
    removed: list[str] = []
    for path in _children(root):
        if temp_kind(path.name) in ("writing", "removing"):
            if _is_dead(path, active_drafts, alone):
                removed += _removed(path, files)
        elif parse_name(path.name) is not None and not path.is_symlink():
            marks = [child for child in _children(path) if temp_kind(child.name) == "marking"]
            removed += [
                name for mark in marks if _is_dead(mark, active_drafts, alone) for name in _removed(mark, files)
            ]
    return removed


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _removed(path: Path, files: Files) -> list[str]:
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            files.remove_tree(path)
        else:
            files.unlink(path)
        return [path.name]
    return []


def _is_dead(path: Path, active_drafts: Collection[str], alone: bool) -> bool:
    if is_mine(path.name):
        # Ours and not active: it could not be removed when its save failed. A mark is written in one call.
        return temp_kind(path.name) != "marking" and path.name not in active_drafts
    runs = owner_is_running(path.name)
    if runs is not None:
        return not runs
    return alone or time.time() - _last_written(path) > FOREIGN_DRAFT_SECONDS


def _last_written(path: Path) -> float:
    """The newest modification time of a path and everything below it."""
    newest = 0.0
    with suppress(OSError):
        newest = path.lstat().st_mtime
        for folder, _, names in os.walk(path):
            for name in ("", *names):
                with suppress(OSError):
                    newest = max(newest, os.lstat(Path(folder, name)).st_mtime)
    return newest
