"""What writers that died left behind: half a checkpoint, half a mark, half a removal."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from surefoot.checkpoint.store import folder_names
from surefoot.checkpoint.store.files import Files

LONG = 24 * 3600.0
"""Seconds after which a draft of another host, which nobody can ask whether it lives, counts as dead."""


def clean(root: Path, files: Files, writing: Collection[str], *, alone: bool) -> list[str]:
    """Remove them, as far as possible, and tell their names; a folder with a checkpoint's name is never removed."""
    gone: list[str] = []
    for path in _inside(root):
        if folder_names.kind_of(path.name) in ("writing", "removing"):
            if _dead(path, writing, alone):
                gone += _removed(path, files)
        elif folder_names.parsed(path.name) is not None and not path.is_symlink():
            marks = [mark for mark in _inside(path) if folder_names.kind_of(mark.name) == "marking"]
            gone += [name for mark in marks if _dead(mark, writing, alone) for name in _removed(mark, files)]
    return gone


def _inside(folder: Path) -> list[Path]:
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


def _dead(path: Path, writing: Collection[str], alone: bool) -> bool:
    if folder_names.mine(path.name):
        # Ours, and not at work: it could not be removed when it failed. A mark is written in one go.
        return folder_names.kind_of(path.name) != "marking" and path.name not in writing
    runs = folder_names.owner_runs(path.name)
    if runs is not None:
        return not runs
    return alone or time.time() - _touched(path) > LONG


def _touched(path: Path) -> float:
    """When anything in it was last written to."""
    newest = 0.0
    with suppress(OSError):
        newest = path.lstat().st_mtime
        for where, _, inside in os.walk(path):
            for name in ("", *inside):
                with suppress(OSError):
                    newest = max(newest, os.lstat(Path(where, name)).st_mtime)
    return newest
