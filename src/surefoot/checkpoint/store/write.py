"""The way of one checkpoint to the disk: filled, sealed and flushed under a name of its own, renamed, read back."""

from __future__ import annotations

import errno
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.checkpoint.store import folder_names
from surefoot.checkpoint.store.entry import StoredCheckpoint, found, plain_files, verified
from surefoot.checkpoint.store.failures import SaveFailed, not_saved
from surefoot.checkpoint.store.files import Entry, Files
from surefoot.checkpoint.store.manifest import NAME, Manifest, safe_name

WRITING: set[str] = set()
"""Names of the drafts this process is at work on."""
_TRIES = 100


@dataclass(slots=True)
class Draft:
    """A checkpoint that is being written: put files into `folder`, then `commit` it or `drop` it."""

    folder: Path
    step: int
    attempt: int
    handed_in: bool = False
    """Whether it was given to `commit`, whose business it is from then on."""


def fill(draft: Draft, known: Mapping[str, Entry], about: Mapping[str, Any], files: Files) -> bytes:
    """Hash and flush all that was written, and add the manifest, which is handed back."""
    written = {path.relative_to(draft.folder).as_posix(): path for path in plain_files(draft.folder)}
    _match(draft, written, known)
    for path in written.values():
        files.flush(path)
    entries = {name: known[name] if name in known else files.entry(path) for name, path in written.items()}
    told = {"kind": "regular", "health": "unproven", "time": time.time()} | dict(about)
    data = Manifest(step=draft.step, attempt=draft.attempt, about=told, files=entries).as_bytes()
    below = {parent for path in written.values() for parent in path.parents if draft.folder in parent.parents}
    for folder in [*sorted(below, reverse=True), draft.folder]:
        files.flush_folder(folder)
    files.write(draft.folder / NAME, data)
    files.flush_folder(draft.folder)
    return data


def land(draft: Draft, root: Path, data: bytes, files: Files) -> Path:
    """Give the draft its name: from here on it is a checkpoint."""
    for _ in range(_TRIES):
        target = root / folder_names.free_name(_taken(root), draft.step, draft.attempt)
        try:
            files.rename(draft.folder, target)
        except FileNotFoundError:
            # A network disk may carry out a rename, lose the answer, and be asked again.
            if not _holds(target, data):
                raise
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            continue
        files.flush_folder(root)
        return target
    raise SaveFailed(f"{not_saved(draft.step)}: no name is free in {root}")


def read_back(draft: Draft, folder: Path, data: bytes, files: Files) -> StoredCheckpoint:
    """The checkpoint as the disk gives it back; raises SaveFailed if that is not what was written."""
    kept = verified(found(folder), files, cold=True)
    if kept.wrong or not _holds(folder, data):
        wrong = ", ".join(map(str, kept.wrong)) or f"{NAME}: is not what was written"
        raise SaveFailed(
            f"{not_saved(draft.step)}: read back, it is not what was written ({wrong})",
            kind="damaged",
        )
    return kept


def retire(folder: Path, files: Files) -> None:
    """Remove a folder; a checkpoint loses its name first, so that no crash leaves half of one."""
    if folder_names.parsed(folder.name) is not None:
        hidden = folder.with_name(folder_names.owned("removing", folder.name))
        files.rename(folder, hidden)
        files.flush_folder(folder.parent)
        folder = hidden
    files.remove_tree(folder)


def _match(draft: Draft, written: Mapping[str, Path], known: Mapping[str, Entry]) -> None:
    """Whether what the ranks told fits what lies there."""
    wrong = [f"{name} was told of and is not there" for name in known if name not in written]
    for name, path in written.items():
        if path.is_symlink() or not path.is_file() or not safe_name(name):
            wrong.append(f"{name} is no plain file with a plain name")
        elif name in known and (size := path.stat().st_size) != known[name].size:
            wrong.append(f"{name} has {size:,} bytes, and {known[name].size:,} were told of")
    if not written:
        wrong.append("nothing was written")
    if wrong:
        words = ", ".join(wrong[:5])
        raise SaveFailed(f"{not_saved(draft.step)}: {words}", kind="damaged")


def _taken(root: Path) -> Collection[str]:
    return {path.name for path in root.iterdir()}


def _holds(folder: Path, data: bytes) -> bool:
    try:
        return (folder / NAME).read_bytes() == data
    except OSError:
        return False
