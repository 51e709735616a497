"""The checkpoints of a run on disk: each a folder of its own that is whole or not there, and never changes again."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from surefoot.checkpoint.store import folder_names, marks
from surefoot.checkpoint.store.entry import Health, StoredCheckpoint, found, verified
from surefoot.checkpoint.store.failures import CheckpointWarning, NothingWhole, SaveFailed, failed, not_saved
from surefoot.checkpoint.store.files import Entry, Files
from surefoot.checkpoint.store.leftovers import clean
from surefoot.checkpoint.store.pruning import Pruning
from surefoot.checkpoint.store.retention import Retention
from surefoot.checkpoint.store.stall_watch import Watched, patiently
from surefoot.checkpoint.store.write import WRITING, Draft, fill, land, read_back, retire

T = TypeVar("T")

_TIERS: dict[Health, tuple[frozenset[Health], ...]] = {
    "healthy": (frozenset({"healthy"}), frozenset({"unproven"}), frozenset({"suspect"})),
    "unproven": (frozenset({"healthy", "unproven"}), frozenset({"suspect"})),
    "suspect": (frozenset({"healthy", "unproven", "suspect"}),),
}


@dataclass(frozen=True, slots=True)
class Saved:
    """What came of a commit."""

    kept: StoredCheckpoint
    removed: tuple[str, ...] = ()
    """Older checkpoints that went."""
    trouble: str = ""
    """Why older ones could not go; the new one is whole all the same."""


class Store:
    """All checkpoints of one run; `root` is its folder `checkpoints`.

    Only the process that holds the run's lock may write (draft, commit, mark, clean); anyone may read at any time.
    """

    def __init__(
        self, root: Path, *, files: Files | None = None, keep: Retention | None = None, patience: float = 300.0
    ) -> None:
        self.root = Path(root)
        self._files = files or Files()
        self._patience = patience
        self._pruning = Pruning(keep or Retention())

    @property
    def files(self) -> Files:
        """The door to the disk."""
        return self._files

    # -- writing

    def draft(self, step: int, attempt: int, *, needs: int = 0) -> Draft:
        """A new folder to write a checkpoint of about `needs` bytes into; raises SaveFailed."""
        return self._patiently(not_saved(step), lambda disk: self._draft(step, attempt, needs, disk))

    def drop(self, draft: Draft) -> None:
        """Remove a draft, as far as that is possible; what is left goes at the next `clean`."""
        with suppress(OSError):
            self._files.remove_tree(draft.folder)
        WRITING.discard(draft.folder.name)

    @contextmanager
    def writing(self, step: int, attempt: int, *, needs: int = 0) -> Iterator[Draft]:
        """A draft that is dropped at the end unless it was committed; errors of the system become SaveFailed."""
        draft = self.draft(step, attempt, needs=needs)
        with self.filling(draft):
            yield draft

    @contextmanager
    def filling(self, draft: Draft) -> Iterator[None]:
        """The same for a draft that is there already."""
        try:
            yield
        except OSError as error:
            raise failed(not_saved(draft.step), error) from error
        finally:
            if not draft.handed_in:
                self.drop(draft)

    def commit(
        self, draft: Draft, files: Mapping[str, Entry] | None = None, about: Mapping[str, Any] | None = None
    ) -> Saved:
        """Make a checkpoint of a draft: hash, manifest, flush, rename, read back; then let older ones go.

        `files` are what the ranks already hashed (`settle`), by name; the rest is hashed here. Raises SaveFailed, and
        then the draft is gone and every older checkpoint stands as it was.
        """
        draft.handed_in = True
        save = lambda disk: self._save(draft, files or {}, about or {}, disk)  # noqa: E731
        kept = self._patiently(not_saved(draft.step), save)
        prune = lambda disk: self._pruning.prune(self.all(), kept, disk)  # noqa: E731
        try:
            return Saved(kept, tuple(self._patiently("older checkpoints stay", prune)))
        except SaveFailed as failure:
            return Saved(kept, trouble=failure.reason)

    def mark(self, name: str, health: Health, why: str = "") -> None:
        """Say that a checkpoint proved healthy, or that it is suspect; raises SaveFailed, LookupError."""
        if health not in ("healthy", "suspect"):
            raise ValueError(f"a checkpoint is marked healthy or suspect, not {health!r}")
        kept = self.get(name)
        if kept is None or not kept.seal:
            raise LookupError(f"there is no checkpoint {name} with a manifest that can be read in {self.root}")
        self._patiently(f"{name} was not marked {health}", lambda disk: marks.write(kept, health, why, disk))

    def doubt(self, after: int, why: str) -> list[str]:
        """Mark all checkpoints later than step `after` suspect, as after a rewind to it; tells which."""
        late = [kept.name for kept in self.all() if kept.step > after and kept.seal and kept.health != "suspect"]
        for name in late:
            self.mark(name, "suspect", why)
        return late

    def clean(self, *, alone: bool = False) -> list[str]:
        """Remove what dead writers left; `alone` says that the caller holds the run's lock, so nobody else can live."""
        return clean(self.root, self._files, WRITING, alone=alone)

    # -- reading

    def all(self) -> list[StoredCheckpoint]:
        """Every checkpoint, the newest first, by manifests and sizes; what is damaged is listed with what is wrong."""
        kept = [marks.marked(found(folder)) for folder in self._folders()]
        return sorted(kept, key=lambda one: one.order, reverse=True)

    def get(self, name: str) -> StoredCheckpoint | None:
        """One checkpoint by its name, not verified; None if it is not there."""
        folder = self.root / name
        if folder_names.parsed(name) is None or not folder.is_dir():
            return None
        return marks.marked(found(folder))

    def verify(self, kept: StoredCheckpoint, progress: Callable[[int], None] | None = None) -> StoredCheckpoint:
        """The checkpoint with all that is wrong with it: every byte of every file is read."""
        return verified(kept, self._files, progress=progress)

    def newest(self, *, trust: Health = "unproven") -> StoredCheckpoint | None:
        """The newest checkpoint that is whole; None when there are none at all.

        Newest is the highest step, then attempt; no clock is asked. One that is less than `trust` is passed over while
        an older one that is whole reaches it: by default a suspect one for a healthy or unproven one. What was passed
        over is told in a warning and in `passed`. Raises NothingWhole when some exist and none may be loaded.
        """
        looked: dict[str, StoredCheckpoint] = {}
        try:
            there = self.all()
        except OSError as error:
            raise NothingWhole(self.root, [f"the folder cannot be read: {error.strerror or error}"]) from error
        for tier in _TIERS[trust]:
            for kept in there:
                if kept.health not in tier:
                    continue
                looked[kept.name] = now = self.verify(kept)
                if not now.wrong:
                    return self._chosen(now, [looked.get(one.name, one) for one in there if one.order > now.order])
        there = [looked[kept.name] for kept in there if kept.folder.exists()]
        if there:
            raise NothingWhole(self.root, [_words(kept) for kept in there])
        return None

    # -- inside

    def _patiently(self, failure: str, work: Callable[[Files], T]) -> T:
        """Work on the disk, where anything that goes wrong ends in SaveFailed that begins with these words."""
        watched = Watched(self._files)
        try:
            return patiently(failure, watched, self._patience, lambda: work(watched))
        except OSError as error:
            raise failed(failure, error) from error

    def _draft(self, step: int, attempt: int, needs: int, files: Files) -> Draft:
        self._make_root(files)
        free = files.free(self.root)
        if free < needs:
            raise SaveFailed(
                f"{not_saved(step)}: it needs {needs / 1e9:.2f} GB and the disk of {self.root} has"
                f" {free / 1e9:.2f} GB left. Make room, or keep fewer checkpoints",
                kind="full",
            )
        folder = self.root / folder_names.owned("writing", f"step-{step:08d}")
        WRITING.add(folder.name)
        try:
            files.mkdir(folder)
        except BaseException:
            WRITING.discard(folder.name)
            raise
        return Draft(folder, step, attempt)

    def _chosen(self, kept: StoredCheckpoint, newer: list[StoredCheckpoint]) -> StoredCheckpoint:
        passed = tuple(_words(one) for one in newer if one.folder.exists())
        if passed:
            listed = "; ".join(passed)
            warnings.warn(f"{kept.name} is taken, as newer ones cannot be: {listed}", CheckpointWarning, stacklevel=3)
        return replace(kept, passed=passed)

    def _folders(self) -> list[Path]:
        try:
            with os.scandir(self.root) as inside:
                return [
                    Path(one.path)
                    for one in inside
                    if folder_names.parsed(one.name) and one.is_dir(follow_symlinks=False)
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
        self, draft: Draft, known: Mapping[str, Entry], about: Mapping[str, Any], files: Files
    ) -> StoredCheckpoint:
        there = draft.folder
        try:
            data = fill(draft, known, about, files)
            there = land(draft, self.root, data, files)
            kept = read_back(draft, there, data, files)
        except BaseException:
            with suppress(OSError):  # through the plain files: those that are watched may have been given up
                retire(there, self._files)
            raise
        finally:
            WRITING.discard(draft.folder.name)
        self._pruning.trust(kept)
        return kept


def _words(kept: StoredCheckpoint) -> str:
    if kept.wrong:
        more = f" and {len(kept.wrong) - 3} more" if len(kept.wrong) > 3 else ""
        return f"{kept.name}: " + ", ".join(map(str, kept.wrong[:3])) + more
    return f"{kept.name}: {kept.health}" + (f" ({kept.why})" if kept.why else "")
