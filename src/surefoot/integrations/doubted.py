"""The checkpoints that another trainer wrote: those written in trouble get another name, so that none resumes there."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from surefoot.guard.guard import Guard

log = logging.getLogger("surefoot")
SUFFIX = "-doubted"


@dataclass(frozen=True, slots=True)
class TrainerCheckpoint:
    """A checkpoint of the trainer, and the last attempt that is in it."""

    path: Path
    attempt: int


class TrainerCheckpoints:
    """The checkpoints written since the guard was attached, oldest first."""

    def __init__(self) -> None:
        self._saved: list[TrainerCheckpoint] = []

    def __iter__(self) -> Iterator[TrainerCheckpoint]:
        return iter(self._saved)

    def add(self, path: str | os.PathLike[str], guard: Guard) -> None:
        """The trainer wrote this checkpoint just now; the guard has read all steps."""
        latest = guard.latest
        path = Path(path)
        self._saved = [s for s in self._saved if s.path != path]
        self._saved.append(TrainerCheckpoint(path, -1 if latest is None else latest.attempt))

    def doubt_after(self, attempt: int, *, rename: bool) -> list[Path]:
        """The run went back to its state after this attempt: rename what was written since; returns the old paths."""
        doubted = [s.path for s in self._saved if s.attempt > attempt]
        self._saved = [s for s in self._saved if s.attempt <= attempt]
        for path in doubted if rename else ():
            mark_doubted(path)
        return doubted


def mark_doubted(path: Path) -> None:
    """Rename a checkpoint that was written in trouble: `checkpoint-200` becomes `checkpoint-200-doubted`."""
    if not path.exists():
        return
    new = path.with_name(path.name + SUFFIX)
    count = 1
    while new.exists():
        count += 1
        new = path.with_name(f"{path.name}{SUFFIX}-{count}")
    try:
        path.rename(new)
    except OSError as error:
        log.error("surefoot: %s was written in trouble and could not be renamed: %s", path, error)
    else:
        log.warning("surefoot: %s was written in trouble and is now %s", path, new.name)
