"""Which checkpoints are kept, and the removal of the others once enough complete ones are certain to remain."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

from surefoot.checkpoint.store.files import Files
from surefoot.checkpoint.store.stored_checkpoint import (
    StoredCheckpoint,
    fingerprint,
    is_mine,
    owner_is_running,
    parse_name,
    temp_kind,
    temp_name,
    verify_files,
)

FOREIGN_DRAFT_SECONDS = 24 * 3600.0
"""Seconds without a write after which a draft of another host, whose process cannot be checked, counts as dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Rules for what stays; a checkpoint that no rule selects is removed.

    Order is always that of training (step, then attempt). Time can only add to what stays, so a wrong clock costs disk
    space and nothing else.
    """

    last: int = 3
    """How many of the newest regular checkpoints stay."""
    emergency: int = 2
    """How many of the newest emergency checkpoints stay, in addition to the regular ones."""
    best: str = ""
    """A metric in `about["metrics"]`; the best checkpoint by it stays. Without one, the newest of kind "best" stays."""
    mode: Literal["min", "max"] = "min"
    apart: float = 3600.0
    """Seconds of training between checkpoints that stay as a history; 0 for no history."""
    spaced: int = 24
    """The most that stay as a history, the newest ones: a month of one per hour would fill any disk."""
    least: int = 2
    """Never fewer complete checkpoints than this, whatever the other rules say."""

    def __post_init__(self) -> None:
        if self.last < 1 or self.least < 2 or min(self.emergency, self.spaced) < 0 or self.mode not in ("min", "max"):
            raise ValueError(
                f"Retention needs last >= 1, least >= 2, emergency >= 0, spaced >= 0 and mode min or max; got {self}"
            )


def removable(
    checkpoints: Sequence[StoredCheckpoint], keep: Retention, *, protect: Collection[str] = ()
) -> list[StoredCheckpoint]:
    """Checkpoints that may be removed, in order of removal: damaged and suspect ones first, then the oldest.

    A decision over plain values; does not touch the disk.
    """
    ordered = sorted(checkpoints, key=lambda c: c.order)
    intact = [c for c in ordered if not c.problems]
    stay = {c.name for c in chain(*_selected(intact, keep))} | set(protect)
    for checkpoint in sorted(intact, key=lambda c: (c.health != "suspect", c.order), reverse=True):
        if len(stay & {c.name for c in intact}) >= keep.least:
            break
        stay.add(checkpoint.name)
    staying = [c for c in intact if c.name in stay]
    # Added last, so that a clock never causes the removal of something that would stay without one.
    stay |= {c.name for c in _spaced(intact, keep)}
    gone = [c for c in intact if c.name not in stay]
    for checkpoint in ordered:
        # A damaged one is evidence until enough newer ones exist; what a newer surefoot wrote is not ours to remove.
        newer = sum(other.order > checkpoint.order for other in staying)
        damaged = checkpoint.problems and not checkpoint.newer_version
        if damaged and checkpoint.name not in stay and newer >= keep.last:
            gone.append(checkpoint)
    return sorted(gone, key=lambda c: (not c.problems, c.health != "suspect", c.order))


def _selected(intact: list[StoredCheckpoint], keep: Retention) -> list[Sequence[StoredCheckpoint]]:
    """What each rule that needs no clock selects; `intact` is in the order of training."""
    trusted = [c for c in intact if c.health != "suspect"]
    regular = [c for c in trusted if c.kind != "emergency"]
    healthy = [c for c in trusted if c.health == "healthy"]
    emergency = [c for c in intact if c.kind == "emergency"]
    # Suspect ones stay only until something newer proved healthy, and never take the place of a better one.
    floor = healthy[-1].order if healthy else (-1, -1, -1)
    suspect = [c for c in intact if c.health == "suspect" and c.order > floor]
    return [
        regular[-keep.last :],
        emergency[len(emergency) - min(keep.emergency, len(emergency)) :],
        _best(trusted, keep),
        healthy[-1:],
        suspect[-keep.last :],
    ]


def _best(trusted: list[StoredCheckpoint], keep: Retention) -> Sequence[StoredCheckpoint]:
    if not keep.best:
        return [c for c in trusted if c.kind == "best"][-1:]
    scored = [(value, c) for c in trusted if (value := _metric(c, keep.best)) is not None]
    if not scored:
        return []
    sign = 1.0 if keep.mode == "min" else -1.0
    # Of equally good ones the first: nothing has been better since.
    return [min(scored, key=lambda pair: (sign * pair[0], pair[1].order))[1]]


def _metric(checkpoint: StoredCheckpoint, name: str) -> float | None:
    metrics = checkpoint.about.get("metrics")
    return _number(metrics.get(name)) if isinstance(metrics, dict) else None


def _spaced(intact: list[StoredCheckpoint], keep: Retention) -> Sequence[StoredCheckpoint]:
    """The oldest, then each one at least `apart` seconds after the one chosen before it, or earlier by the clock."""
    if keep.apart <= 0 or not keep.spaced:
        return []
    chosen: list[StoredCheckpoint] = []
    last: float | None = None
    for checkpoint in intact:
        if checkpoint.health == "suspect" or checkpoint.kind == "emergency":
            continue
        now = _number(checkpoint.about.get("seconds"))
        now = _number(checkpoint.about.get("time")) if now is None else now
        if now is not None and (last is None or not 0 <= now - last < keep.apart):
            chosen.append(checkpoint)
            last = now
    return chosen[-keep.spaced :]


def _number(value: object) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None  # pyright: ignore[reportArgumentType]


class Pruner:
    """Removes old checkpoints; remembers which ones were read in full, so that each is read once, not at every save."""

    def __init__(self, keep: Retention) -> None:
        self._keep = keep
        self._verified: dict[str, object] = {}

    def mark_verified(self, checkpoint: StoredCheckpoint) -> None:
        """Every byte of it was just compared and is right."""
        self._verified[checkpoint.name] = fingerprint(checkpoint)

    def prune(self, checkpoints: list[StoredCheckpoint], newest: StoredCheckpoint, files: Files) -> list[str]:
        """Remove what no rule keeps, and return the removed names; `checkpoints` are sorted newest first."""
        gone = removable(checkpoints, self._keep, protect={newest.name})
        must_stay = self._must_stay(checkpoints, gone, files) if gone else set[str]()
        removed: list[str] = []
        for checkpoint in gone:
            if checkpoint.name not in must_stay:
                remove_checkpoint(checkpoint.folder, files)
                self._verified.pop(checkpoint.name, None)
                removed.append(checkpoint.name)
        return removed

    def _must_stay(self, checkpoints: list[StoredCheckpoint], gone: list[StoredCheckpoint], files: Files) -> set[str]:
        """Those to be removed that must stay because too few of the others are complete."""
        leaving = {c.name for c in gone}
        complete = 0
        must_stay: set[str] = set()
        for checkpoint in sorted(checkpoints, key=lambda c: c.name in leaving):
            if complete >= self._keep.least:
                break
            if self._is_complete(checkpoint, files):
                complete += 1
                must_stay |= {checkpoint.name} & leaving
        return must_stay

    def _is_complete(self, checkpoint: StoredCheckpoint, files: Files) -> bool:
        """Whether every byte is right: read now, unless verified before and no file was touched since."""
        now = fingerprint(checkpoint)
        if now is None or checkpoint.problems:
            return False
        if self._verified.get(checkpoint.name) != now:
            if verify_files(checkpoint, files).problems:
                return False
            self._verified[checkpoint.name] = now
        return True


# -- removing folders


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
