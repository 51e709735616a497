"""Processes that write one checkpoint together, by way of the folder they all write to.

Behind the training's back nobody may wait in a collective, which would hang as soon as one process has failed. The
first process says where it writes in a small file; each of the others says in another that it is there, and then what
it has written; at the end the first one says what came of it. All decide alike, without a word, after which attempt
they save; a process that cannot, because it is still at the save before, says so.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from surefoot.checkpoint.store import Entry, SaveFailed

BEGINNING = 60.0
"""Seconds to wait for another process to turn up: they are at most a few steps apart, or one of them has died."""
PATIENCE = 600.0
"""Seconds to wait for one that has turned up, and may have the slower disk."""
_PARTING = 2.0
_POLL = 0.02
_RESULTS = 100
_PREFIX = ".together-"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankGroup:
    """The processes of a run, and a word they have agreed on, so that no file of an earlier run is taken for theirs."""

    rank: int = 0
    world: int = 1
    word: str = "alone"


class Meeting:
    """One save of a team, by its number, which all count alike."""

    def __init__(self, root: Path, team: RankGroup, number: int) -> None:
        self._root = root
        self._team = team
        self._number = number
        self._name = f"{_PREFIX}{team.word}-{number}"
        self._results = root / f"{_PREFIX}{team.word}.over"

    def compare(self, mine: Mapping[str, str]) -> frozenset[str]:
        """Said and heard by all: of the things that are hashed here by name, those that are the same everywhere."""
        if self._team.rank > 0:
            self._root.mkdir(parents=True, exist_ok=True)
            self._say(f"{self._team.rank}.here", {"hashes": dict(mine)})
            told = self._hear("alike", "the first process to begin", BEGINNING)
            if "failed" in told:
                raise SaveFailed(f"the first process could not begin: {told['failed']}")
            return frozenset(map(str, told["alike"]))
        others = [
            self._hear(f"{rank}.here", f"process {rank} to begin", BEGINNING).get("hashes", {})
            for rank in range(1, self._team.world)
        ]
        alike = [name for name, digest in mine.items() if all(other.get(name) == digest for other in others)]
        self._root.mkdir(parents=True, exist_ok=True)
        self._say("alike", {"alike": alike})
        return frozenset(alike)

    def lead(self, folder: Path) -> None:
        """Said by the first process: write in here."""
        for file in self._root.glob(f"{_PREFIX}{self._team.word}-*"):
            if not file.name.startswith(f"{self._name}."):  # of a meeting that is long over
                with suppress(OSError):
                    file.unlink()
        self._say("folder", {"folder": folder.name})

    def follow(self) -> Path:
        """Heard by the others."""
        self._root.mkdir(parents=True, exist_ok=True)
        self._say(f"{self._team.rank}.here", {})
        told = self._hear("folder", "the first process to begin", BEGINNING)
        if "failed" in told:
            raise SaveFailed(f"the first process could not begin: {told['failed']}")
        name = str(told["folder"])
        if "/" in name or name in ("", ".", ".."):
            raise SaveFailed(f"{self._root} says to write in {name!r}, which is no folder of its own", kind="damaged")
        return self._root / name

    def done(self, entries: Mapping[str, Entry]) -> None:
        """Said by the others, who then wait for what comes of it: this is what I wrote."""
        self._say(str(self._team.rank), {"files": {name: [e.size, e.xxh3_128] for name, e in entries.items()}})
        error = self._waited(self._came_of_it, "the first process to end", PATIENCE)
        with suppress(OSError):
            self._path(str(self._team.rank)).unlink()  # nobody waits here any more
        if error:
            raise SaveFailed(error)

    def failed(self, why: str) -> None:
        """Said by anyone, instead of what else there would be to say."""
        first = self._team.rank == 0
        with suppress(OSError):
            if not first:
                self._say(f"{self._team.rank}.here", {})
            self._say("folder" if first else str(self._team.rank), {"failed": why})

    def gather(self) -> dict[str, Entry]:
        """Heard by the first: what all the others wrote."""
        found: dict[str, Entry] = {}
        for rank in range(1, self._team.world):
            self._hear(f"{rank}.here", f"process {rank} to begin", BEGINNING)
        for rank in range(1, self._team.world):
            told = self._hear(str(rank), f"process {rank}", PATIENCE)
            if "failed" in told:
                raise SaveFailed(f"process {rank} could not write its part: {told['failed']}")
            found |= {name: Entry(int(size), str(digits)) for name, (size, digits) in dict(told["files"]).items()}
        return found

    def over(self, error: str = "") -> None:
        """Said by the first, and kept for a while: the others may look for it late."""
        latest = sorted(self._all_results().items(), key=lambda one: int(one[0]))[-_RESULTS:]
        with suppress(OSError):
            _write(self._results, {**dict(latest), str(self._number): error})

    def _came_of_it(self) -> str | None:
        return self._all_results().get(str(self._number))

    def _all_results(self) -> dict[str, str]:
        with suppress(OSError, ValueError):
            return dict(json.loads(self._results.read_text()))
        return {}

    def _path(self, what: str) -> Path:
        return self._root / f"{self._name}.{what}"

    def _say(self, what: str, told: Mapping[str, Any]) -> None:
        _write(self._path(what), told)

    def _hear(self, what: str, whom: str, patience: float) -> dict[str, Any]:
        path = self._path(what)

        def look() -> dict[str, Any] | None:
            with suppress(OSError, ValueError):
                return dict(json.loads(path.read_text()))
            over = self._came_of_it() if self._team.rank else None
            return None if over is None else {"failed": over or "it was done without this one"}

        return self._waited(look, whom, patience)

    def _waited(self, look: Callable[[], T | None], whom: str, patience: float) -> T:
        until = time.monotonic() + patience
        while (found := look()) is None:
            if time.monotonic() > until:
                raise SaveFailed(
                    f"waited {patience:.0f} s for {whom}. Does it still run, and do all write to the same disk?"
                )
            time.sleep(_POLL)
        return found


def _write(path: Path, told: Mapping[str, Any]) -> None:
    draft = path.with_name(path.name + ".new")
    draft.write_text(json.dumps(told))
    os.replace(draft, path)


def part(root: Path, team: RankGroup) -> None:
    """The first process goes: what it said may go too, as soon as the others have heard it."""
    if team.world == 1 or team.rank > 0:
        return
    until = time.monotonic() + _PARTING
    names = [f"{_PREFIX}{team.word}-*.{rank}" for rank in range(1, team.world)]
    while time.monotonic() < until and any(file for name in names for file in root.glob(name)):
        time.sleep(_POLL)
    forget(root, team.word)


def forget(root: Path, word: str = "") -> None:
    """Remove what processes of an earlier time have said."""
    for file in root.glob(f"{_PREFIX}{word}*"):
        with suppress(OSError):
            file.unlink()
