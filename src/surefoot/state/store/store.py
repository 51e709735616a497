"""The checkpoints of a run on disk: each a folder of its own that is whole or not there, and never changes again."""

from __future__ import annotations

import errno
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from surefoot.state.store import marks, names
from surefoot.state.store.failures import CheckpointWarning, NothingWhole, SaveFailed, failed
from surefoot.state.store.files import Entry, Files
from surefoot.state.store.kept import Health, Kept, fingerprint, found, plain_files, verified
from surefoot.state.store.leftovers import clean
from surefoot.state.store.manifest import NAME, Manifest, safe_name
from surefoot.state.store.retention import Retention, going
from surefoot.state.store.watched import GivenUp, Watched, patiently

_TIERS: dict[Health, tuple[frozenset[Health], ...]] = {
    "healthy": (frozenset({"healthy"}), frozenset({"unproven"}), frozenset({"suspect"})),
    "unproven": (frozenset({"healthy", "unproven"}), frozenset({"suspect"})),
    "suspect": (frozenset({"healthy", "unproven", "suspect"}),),
}


@dataclass(frozen=True, slots=True)
class Draft:
    """A checkpoint that is being written: put files into `folder`, then `commit` it or `drop` it."""

    folder: Path
    step: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Saved:
    """What came of a commit."""

    kept: Kept
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
        self.keep = keep or Retention()
        self._files = files or Files()
        self._patience = patience
        self._known: dict[str, object] = {}  # by name: how the files looked when every byte of them was right

    # -- writing

    def draft(self, step: int, attempt: int, *, needs: int = 0) -> Draft:
        """A new folder to write a checkpoint of about `needs` bytes into; raises SaveFailed."""
        with _told(step):
            self._make_root()
            free = self._files.free(self.root)
            if free < needs:
                raise SaveFailed(
                    f"the checkpoint of step {step} was not saved: it needs {needs / 1e9:.2f} GB and the disk of"
                    f" {self.root} has {free / 1e9:.2f} GB left. Make room, or keep fewer checkpoints",
                    kind="full",
                )
            folder = self.root / names.owned("writing", f"step-{step:08d}")
            _WRITING.add(folder.name)
            try:
                self._files.mkdir(folder)
            except BaseException:
                _WRITING.discard(folder.name)
                raise
        return Draft(folder, step, attempt)

    def drop(self, draft: Draft) -> None:
        """Remove a draft, as far as that is possible; what is left goes at the next `clean`."""
        with suppress(OSError):
            self._files.remove_tree(draft.folder)
        _WRITING.discard(draft.folder.name)

    @contextmanager
    def writing(self, step: int, attempt: int, *, needs: int = 0) -> Iterator[Draft]:
        """A draft that is dropped at the end unless it was committed."""
        draft = self.draft(step, attempt, needs=needs)
        try:
            yield draft
        finally:
            if draft.folder.name in _WRITING:
                self.drop(draft)

    def commit(
        self, draft: Draft, files: Mapping[str, Entry] | None = None, about: Mapping[str, Any] | None = None
    ) -> Saved:
        """Make a checkpoint of a draft: hash, manifest, flush, rename, read back; then let older ones go.

        `files` are what the ranks already hashed (`settle`), by name; the rest is hashed here. Raises SaveFailed, and
        then the draft is gone and every older checkpoint stands as it was.
        """
        watched = Watched(self._files)
        work = lambda: self._commit(draft, dict(files or {}), about or {}, watched)  # noqa: E731
        with _told(draft.step):
            return patiently(draft.step, watched, self._patience, work)

    def mark(self, name: str, health: Health, why: str = "") -> None:
        """Say that a checkpoint proved healthy, or that it is suspect; raises SaveFailed, LookupError."""
        if health not in ("healthy", "suspect"):
            raise ValueError(f"a checkpoint is marked healthy or suspect, not {health!r}")
        kept = self.get(name)
        if kept is None or not kept.seal:
            raise LookupError(f"there is no checkpoint {name} with a manifest that can be read in {self.root}")
        with _told(kept.step):
            marks.write(kept, health, why, self._files)

    def doubt(self, after: int, why: str) -> list[str]:
        """Mark all checkpoints later than step `after` suspect, as after a rewind to it; tells which."""
        late = [kept.name for kept in self.all() if kept.step > after and kept.seal and kept.health != "suspect"]
        for name in late:
            self.mark(name, "suspect", why)
        return late

    def clean(self, *, alone: bool = False) -> list[str]:
        """Remove what dead writers left; `alone` says that the caller holds the run's lock, so nobody else can live."""
        return clean(self.root, self._files, _WRITING, alone=alone)

    # -- reading

    def all(self) -> list[Kept]:
        """Every checkpoint, the newest first, by manifests and sizes; what is damaged is listed with what is wrong."""
        kept = [marks.marked(found(folder)) for folder in self._folders()]
        return sorted(kept, key=lambda one: one.order, reverse=True)

    def get(self, name: str) -> Kept | None:
        """One checkpoint by its name, not verified; None if it is not there."""
        folder = self.root / name
        if names.parsed(name) is None or not folder.is_dir():
            return None
        return marks.marked(found(folder))

    def verify(self, kept: Kept, progress: Callable[[int], None] | None = None) -> Kept:
        """The checkpoint with all that is wrong with it: every byte of every file is read."""
        return verified(kept, self._files, progress=progress)

    def newest(self, *, trust: Health = "unproven") -> Kept | None:
        """The newest checkpoint that is whole; None when there are none at all.

        Newest is the highest step, then attempt; no clock is asked. One that is less than `trust` is passed over while
        an older one that is whole reaches it: by default a suspect one for a healthy or unproven one. What was passed
        over is told in a warning and in `passed`. Raises NothingWhole when some exist and none may be loaded.
        """
        looked: dict[str, Kept] = {}
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

    def _chosen(self, kept: Kept, newer: list[Kept]) -> Kept:
        passed = tuple(_words(one) for one in newer if one.folder.exists())
        if passed:
            listed = "; ".join(passed)
            warnings.warn(f"{kept.name} is taken, as newer ones cannot be: {listed}", CheckpointWarning, stacklevel=3)
        return replace(kept, passed=passed)

    def _folders(self) -> list[Path]:
        try:
            with os.scandir(self.root) as inside:
                return [
                    Path(one.path) for one in inside if names.parsed(one.name) and one.is_dir(follow_symlinks=False)
                ]
        except FileNotFoundError:
            return []

    def _make_root(self) -> None:
        missing = [folder for folder in (self.root, *self.root.parents) if not folder.exists()]
        for folder in reversed(missing):
            with suppress(FileExistsError):
                self._files.mkdir(folder)
            self._files.flush_folder(folder.parent)

    def _commit(self, draft: Draft, known: dict[str, Entry], about: Mapping[str, Any], files: Watched) -> Saved:
        there = draft.folder
        try:
            data = self._fill(draft, known, about, files)
            there = self._land(draft, data, files)
            kept = self._read_back(draft, there, data, files)
        except BaseException:
            with suppress(OSError):  # through the plain files: those that are watched may have been given up
                self._retire(there, self._files)
            raise
        finally:
            _WRITING.discard(draft.folder.name)
        try:
            return Saved(kept, tuple(self._prune(kept, files)))
        except OSError as error:
            return Saved(kept, trouble=f"older checkpoints stay: {error.strerror or error}")

    def _fill(self, draft: Draft, known: dict[str, Entry], about: Mapping[str, Any], files: Files) -> bytes:
        """Hash and flush all that was written, and add the manifest."""
        written = {path.relative_to(draft.folder).as_posix(): path for path in plain_files(draft.folder)}
        _matches(draft, written, known)
        for path in written.values():
            files.flush(path)
        known |= {name: files.entry(path) for name, path in written.items() if name not in known}
        told = {"kind": "regular", "health": "unproven", "time": time.time()} | dict(about)
        manifest = Manifest(step=draft.step, attempt=draft.attempt, about=told, files=known)
        data = manifest.as_bytes()
        for folder in sorted({parent for path in written.values() for parent in path.parents}, reverse=True):
            if draft.folder in folder.parents:
                files.flush_folder(folder)
        files.flush_folder(draft.folder)
        files.write(draft.folder / NAME, data)
        files.flush_folder(draft.folder)
        return data

    def _land(self, draft: Draft, data: bytes, files: Files) -> Path:
        """Give the draft its name: from here on it is a checkpoint."""
        for _ in range(100):
            target = self.root / names.free_name({one.name for one in self._folders()}, draft.step, draft.attempt)
            try:
                files.rename(draft.folder, target)
            except FileNotFoundError:
                # A network disk may carry out a rename, lose the answer, and be asked again.
                if not _is(target, data):
                    raise
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                continue
            files.flush_folder(self.root)
            return target
        raise SaveFailed(f"the checkpoint of step {draft.step} was not saved: no name is free in {self.root}")

    def _read_back(self, draft: Draft, folder: Path, data: bytes, files: Files) -> Kept:
        kept = verified(found(folder), files, cold=True)
        if kept.wrong or not _is(folder, data):
            wrong = ", ".join(map(str, kept.wrong)) or f"{NAME}: is not what was written"
            raise SaveFailed(
                f"the checkpoint of step {draft.step} was not saved: read back, it is not what was written ({wrong})",
                kind="damaged",
            )
        self._known[kept.name] = fingerprint(kept)
        return kept

    def _prune(self, newest: Kept, files: Files) -> list[str]:
        there = self.all()
        gone = going(there, self.keep, protect={newest.name})
        spared = self._spared(there, gone) if gone else set[str]()
        removed: list[str] = []
        for kept in gone:
            if kept.name not in spared:
                self._retire(kept.folder, files)
                self._known.pop(kept.name, None)
                removed.append(kept.name)
        return removed

    def _spared(self, there: list[Kept], gone: list[Kept]) -> set[str]:
        """Of those that should go the ones that must stay, because too few of the others are whole."""
        leaving = {kept.name for kept in gone}
        whole = 0
        spared: set[str] = set()
        for kept in sorted(there, key=lambda kept: kept.name in leaving):
            if whole >= self.keep.least:
                break
            if self._whole(kept):
                whole += 1
                spared |= {kept.name} & leaving
        return spared

    def _whole(self, kept: Kept) -> bool:
        """Whether every byte is right: read now, unless it was read before and no file has been touched since."""
        now = fingerprint(kept)
        if now is None or kept.wrong:
            return False
        if self._known.get(kept.name) != now:
            if self.verify(kept).wrong:
                return False
            self._known[kept.name] = now
        return True

    def _retire(self, folder: Path, files: Files) -> None:
        """Remove a folder; a checkpoint loses its name first, so that no crash leaves half of one."""
        if names.parsed(folder.name) is not None:
            hidden = folder.with_name(names.owned("removing", folder.name))
            files.rename(folder, hidden)
            files.flush_folder(self.root)
            folder = hidden
        files.remove_tree(folder)


_WRITING: set[str] = set()
"""Names of the drafts this process is at work on."""


def _matches(draft: Draft, written: Mapping[str, Path], known: Mapping[str, Entry]) -> None:
    """Whether what the ranks told fits what lies there."""
    wrong = [f"{name} was told of and is not there" for name in known if name not in written]
    for name, path in written.items():
        if path.is_symlink() or not path.is_file() or not safe_name(name):
            wrong.append(f"{name} is no plain file with a plain name")
        elif name in known and path.stat().st_size != known[name].size:
            wrong.append(f"{name} has {path.stat().st_size:,} bytes, and {known[name].size:,} were told of")
    if not written:
        wrong.append("nothing was written")
    if wrong:
        words = ", ".join(wrong[:5])
        raise SaveFailed(f"the checkpoint of step {draft.step} was not saved: {words}", kind="damaged")


def _is(folder: Path, data: bytes) -> bool:
    try:
        return (folder / NAME).read_bytes() == data
    except OSError:
        return False


def _words(kept: Kept) -> str:
    if kept.wrong:
        more = f" and {len(kept.wrong) - 3} more" if len(kept.wrong) > 3 else ""
        return f"{kept.name}: " + ", ".join(map(str, kept.wrong[:3])) + more
    return f"{kept.name}: {kept.health}" + (f" ({kept.why})" if kept.why else "")


@contextmanager
def _told(step: int) -> Iterator[None]:
    """Errors of the system become SaveFailed."""
    try:
        yield
    except OSError as error:
        raise failed(step, error) from error
    except GivenUp:
        raise SaveFailed(f"the checkpoint of step {step} was not saved: the disk was given up", kind="hangs") from None
