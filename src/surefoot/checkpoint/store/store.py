"""The checkpoints of one run on disk: each is a folder that is complete or absent, and never changes once written."""

from __future__ import annotations

import errno
import os
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from surefoot.checkpoint.store.failures import (
    NOT_SAVED,
    CheckpointWarning,
    NoUsableCheckpoint,
    SaveFailed,
    save_failed,
)
from surefoot.checkpoint.store.files import FileEntry, Files, WatchedFiles, run_with_stall_timeout
from surefoot.checkpoint.store.manifest import NAME, Manifest, safe_name
from surefoot.checkpoint.store.retention import Pruner, Retention, remove_checkpoint, remove_leftovers
from surefoot.checkpoint.store.stored_checkpoint import (
    Health,
    StoredCheckpoint,
    free_name,
    list_files,
    parse_name,
    read_checkpoint,
    temp_name,
    verify_files,
    with_mark,
    write_mark,
)

T = TypeVar("T")

ACTIVE_DRAFTS: set[str] = set()
"""Names of the drafts that this process is writing."""
_MAX_TRIES = 100
_TIERS: dict[Health, tuple[frozenset[Health], ...]] = {
    "healthy": (frozenset({"healthy"}), frozenset({"unproven"}), frozenset({"suspect"})),
    "unproven": (frozenset({"healthy", "unproven"}), frozenset({"suspect"})),
    "suspect": (frozenset({"healthy", "unproven", "suspect"}),),
}


@dataclass(slots=True)
class Draft:
    """A checkpoint being written: put files into `folder`, then `commit` or `drop` it."""

    folder: Path
    step: int
    attempt: int
    committed: bool = False
    """Whether `commit` was called, which is responsible for it from then on."""


@dataclass(frozen=True, slots=True)
class CommitResult:
    """The new checkpoint, and the older ones removed for it."""

    checkpoint: StoredCheckpoint
    removed: tuple[str, ...] = ()
    prune_error: str = ""
    """Why older checkpoints could not be removed; the new one is complete all the same."""


class CheckpointStore:
    """All checkpoints of one run; `root` is its `checkpoints` folder.

    Only the process that holds the run's lock may write (draft, commit, mark, clean); anyone may read at any time.
    """

    def __init__(
        self, root: Path, *, files: Files | None = None, keep: Retention | None = None, stall_timeout: float = 300.0
    ) -> None:
        self.root = Path(root)
        self._files = files or Files()
        self._stall_timeout = stall_timeout
        self._pruner = Pruner(keep or Retention())

    @property
    def files(self) -> Files:
        """The file system access of this store."""
        return self._files

    # -- writing

    def draft(self, step: int, attempt: int, *, needs: int = 0) -> Draft:
        """Create a folder to write a checkpoint of about `needs` bytes into; raises SaveFailed."""
        return self._run(NOT_SAVED.format(step), lambda disk: self._draft(step, attempt, needs, disk))

    def drop(self, draft: Draft) -> None:
        """Remove a draft as far as possible; the next `clean` removes what is left."""
        with suppress(OSError):
            self._files.remove_tree(draft.folder)
        ACTIVE_DRAFTS.discard(draft.folder.name)

    @contextmanager
    def writing(self, step: int, attempt: int, *, needs: int = 0) -> Iterator[Draft]:
        """A draft that is dropped on exit unless it was committed; an OSError becomes SaveFailed."""
        draft = self.draft(step, attempt, needs=needs)
        with self.filling(draft):
            yield draft

    @contextmanager
    def filling(self, draft: Draft) -> Iterator[None]:
        """Like `writing`, for an existing draft."""
        try:
            yield
        except OSError as error:
            raise save_failed(NOT_SAVED.format(draft.step), error) from error
        finally:
            if not draft.committed:
                self.drop(draft)

    def commit(
        self, draft: Draft, files: Mapping[str, FileEntry] | None = None, about: Mapping[str, Any] | None = None
    ) -> CommitResult:
        """Turn a draft into a checkpoint: hash, manifest, fsync, rename, read back; then prune older checkpoints.

        `files` are entries that ranks already hashed (`flush_and_hash`), by name; the rest is hashed here. On
        SaveFailed the draft is gone and every older checkpoint is unchanged.
        """
        draft.committed = True
        save = lambda disk: self._save(draft, files or {}, about or {}, disk)  # noqa: E731
        checkpoint = self._run(NOT_SAVED.format(draft.step), save)
        prune = lambda disk: self._pruner.prune(self.all(), checkpoint, disk)  # noqa: E731
        try:
            return CommitResult(checkpoint, tuple(self._run("older checkpoints were not removed", prune)))
        except SaveFailed as failure:
            return CommitResult(checkpoint, prune_error=failure.reason)

    def mark(self, name: str, health: Health, reason: str = "") -> None:
        """Mark a checkpoint healthy or suspect; raises SaveFailed, LookupError."""
        if health not in ("healthy", "suspect"):
            raise ValueError(f"a checkpoint is marked healthy or suspect, not {health!r}")
        checkpoint = self.get(name)
        if checkpoint is None or not checkpoint.seal:
            raise LookupError(f"{self.root} has no checkpoint {name} with a readable manifest")
        self._run(f"{name} was not marked {health}", lambda disk: write_mark(checkpoint, health, reason, disk))

    def mark_suspect_after(self, step: int, reason: str) -> list[str]:
        """Mark all checkpoints after `step` suspect, as after a rewind to it; returns their names."""
        later = [c.name for c in self.all() if c.step > step and c.seal and c.health != "suspect"]
        for name in later:
            self.mark(name, "suspect", reason)
        return later

    def clean(self, *, alone: bool = False) -> list[str]:
        """Remove what dead processes left; `alone` says that the caller holds the run's lock, so no writer is alive."""
        return remove_leftovers(self.root, self._files, ACTIVE_DRAFTS, alone=alone)

    # -- reading

    def all(self) -> list[StoredCheckpoint]:
        """Every checkpoint, newest first, from manifests and file sizes; damaged ones are included, with problems."""
        checkpoints = [with_mark(read_checkpoint(folder)) for folder in self._folders()]
        return sorted(checkpoints, key=lambda c: c.order, reverse=True)

    def get(self, name: str) -> StoredCheckpoint | None:
        """One checkpoint by name, not verified; None if it does not exist."""
        folder = self.root / name
        if parse_name(name) is None or not folder.is_dir():
            return None
        return with_mark(read_checkpoint(folder))

    def verify(self, checkpoint: StoredCheckpoint, progress: Callable[[int], None] | None = None) -> StoredCheckpoint:
        """The checkpoint with all its problems: every byte of every file is read."""
        return verify_files(checkpoint, self._files, progress=progress)

    def newest(self, *, trust: Health = "unproven") -> StoredCheckpoint | None:
        """The newest complete checkpoint; None when there are none at all.

        Newest is the highest step, then attempt; clocks are ignored. A checkpoint below `trust` is skipped while an
        older complete one reaches it: by default, a suspect one for a healthy or unproven one. Skipped checkpoints are
        listed in a warning and in `skipped`. Raises NoUsableCheckpoint when some exist and none may be loaded.
        """
        verified: dict[str, StoredCheckpoint] = {}
        try:
            checkpoints = self.all()
        except OSError as error:
            raise NoUsableCheckpoint(self.root, [f"the folder cannot be read: {error.strerror or error}"]) from error
        for tier in _TIERS[trust]:
            for candidate in checkpoints:
                if candidate.health not in tier:
                    continue
                verified[candidate.name] = checkpoint = self.verify(candidate)
                if not checkpoint.problems:
                    newer = [verified.get(c.name, c) for c in checkpoints if c.order > checkpoint.order]
                    return self._with_skipped(checkpoint, newer)
        unusable = [verified[c.name] for c in checkpoints if c.folder.exists()]
        if unusable:
            raise NoUsableCheckpoint(self.root, [_describe(c) for c in unusable])
        return None

    # -- internals

    def _run(self, failure: str, work: Callable[[Files], T]) -> T:
        """Do `work` on the disk; any stall or OSError becomes a SaveFailed whose message begins with `failure`."""
        watched = WatchedFiles(self._files)
        try:
            return run_with_stall_timeout(failure, watched, self._stall_timeout, lambda: work(watched))
        except OSError as error:
            raise save_failed(failure, error) from error

    def _draft(self, step: int, attempt: int, needs: int, files: Files) -> Draft:
        self._make_root(files)
        free = files.free(self.root)
        if free < needs:
            raise SaveFailed(
                f"{NOT_SAVED.format(step)}: it needs {needs / 1e9:.2f} GB, and the disk of {self.root} has"
                f" {free / 1e9:.2f} GB left. Free some space, or keep fewer checkpoints",
                kind="full",
            )
        folder = self.root / temp_name("writing", f"step-{step:08d}")
        ACTIVE_DRAFTS.add(folder.name)
        try:
            files.mkdir(folder)
        except BaseException:
            ACTIVE_DRAFTS.discard(folder.name)
            raise
        return Draft(folder, step, attempt)

    def _with_skipped(self, checkpoint: StoredCheckpoint, newer: list[StoredCheckpoint]) -> StoredCheckpoint:
        skipped = tuple(_describe(c) for c in newer if c.folder.exists())
        if skipped:
            message = f"using {checkpoint.name}; newer checkpoints were skipped: {'; '.join(skipped)}"
            warnings.warn(message, CheckpointWarning, stacklevel=3)
        return replace(checkpoint, skipped=skipped)

    def _folders(self) -> list[Path]:
        try:
            with os.scandir(self.root) as entries:
                return [
                    Path(entry.path)
                    for entry in entries
                    if parse_name(entry.name) and entry.is_dir(follow_symlinks=False)
                ]
        except FileNotFoundError:
            return []

    def _make_root(self, files: Files) -> None:
        missing = [folder for folder in (self.root, *self.root.parents) if not folder.exists()]
        for folder in reversed(missing):
            with suppress(FileExistsError):
                files.mkdir(folder)
            files.flush_folder(folder.parent)

    def _save(
        self, draft: Draft, known: Mapping[str, FileEntry], about: Mapping[str, Any], files: Files
    ) -> StoredCheckpoint:
        folder = draft.folder
        try:
            data = _seal_draft(draft, known, about, files)
            folder = _publish_draft(draft, self.root, data, files)
            checkpoint = _read_back(draft, folder, data, files)
        except BaseException:
            with suppress(OSError):  # through the unwatched files: the watched ones may have been abandoned
                remove_checkpoint(folder, self._files)
            raise
        finally:
            ACTIVE_DRAFTS.discard(draft.folder.name)
        self._pruner.mark_verified(checkpoint)
        return checkpoint


def _describe(checkpoint: StoredCheckpoint) -> str:
    problems = checkpoint.problems
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        return f"{checkpoint.name}: " + ", ".join(map(str, problems[:3])) + more
    return f"{checkpoint.name}: {checkpoint.health}" + (f" ({checkpoint.reason})" if checkpoint.reason else "")


def _seal_draft(draft: Draft, known: Mapping[str, FileEntry], about: Mapping[str, Any], files: Files) -> bytes:
    """Hash and fsync all files of a draft, write its manifest, and return the manifest's bytes."""
    written = {path.relative_to(draft.folder).as_posix(): path for path in list_files(draft.folder)}
    _check_written(draft, written, known)
    for path in written.values():
        files.flush(path)
    entries = {name: known[name] if name in known else files.hash(path) for name, path in written.items()}
    values = {"kind": "regular", "health": "unproven", "time": time.time()} | dict(about)
    data = Manifest(step=draft.step, attempt=draft.attempt, about=values, files=entries).as_bytes()
    subfolders = {parent for path in written.values() for parent in path.parents if draft.folder in parent.parents}
    for folder in [*sorted(subfolders, reverse=True), draft.folder]:
        files.flush_folder(folder)
    files.write(draft.folder / NAME, data)
    files.flush_folder(draft.folder)
    return data


def _publish_draft(draft: Draft, root: Path, data: bytes, files: Files) -> Path:
    """Rename the draft to its final name: from here on it is a checkpoint."""
    for _ in range(_MAX_TRIES):
        target = root / free_name(_names_in(root), draft.step, draft.attempt)
        try:
            files.rename(draft.folder, target)
        except FileNotFoundError:
            # A network disk may perform a rename, lose the reply, and receive the request again.
            if not _has_manifest(target, data):
                raise
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            continue
        files.flush_folder(root)
        return target
    raise SaveFailed(f"{NOT_SAVED.format(draft.step)}: no free name in {root}")


def _read_back(draft: Draft, folder: Path, data: bytes, files: Files) -> StoredCheckpoint:
    """Read the checkpoint back from the disk; raises SaveFailed if it is not what was written."""
    checkpoint = verify_files(read_checkpoint(folder), files, cold=True)
    if checkpoint.problems or not _has_manifest(folder, data):
        problems = ", ".join(map(str, checkpoint.problems)) or f"{NAME}: is not what was written"
        raise SaveFailed(
            f"{NOT_SAVED.format(draft.step)}: the disk returned different data ({problems})", kind="damaged"
        )
    return checkpoint


def _check_written(draft: Draft, written: Mapping[str, Path], known: Mapping[str, FileEntry]) -> None:
    """Check that the entries reported by the ranks match the files in the draft; raises SaveFailed."""
    problems = [f"{name} was reported but does not exist" for name in known if name not in written]
    for name, path in written.items():
        if path.is_symlink() or not path.is_file() or not safe_name(name):
            problems.append(f"{name} is not a plain file with a plain name")
        elif name in known and (size := path.stat().st_size) != known[name].size:
            problems.append(f"{name} has {size:,} bytes, but {known[name].size:,} were reported")
    if not written:
        problems.append("nothing was written")
    if problems:
        raise SaveFailed(f"{NOT_SAVED.format(draft.step)}: {', '.join(problems[:5])}", kind="damaged")


def _names_in(root: Path) -> Collection[str]:
    return {path.name for path in root.iterdir()}


def _has_manifest(folder: Path, data: bytes) -> bool:
    try:
        return (folder / NAME).read_bytes() == data
    except OSError:
        return False
