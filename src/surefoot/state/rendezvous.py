"""Processes that write one checkpoint together, by way of the folder they all write to.

Behind the training's back nobody may wait in a collective, which would hang as soon as one process has failed. The
first process says where it writes in a small file; each of the others says in another what it has written.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.state.store import Entry, SaveFailed

PATIENCE = 600.0
"""Seconds to wait for another process, which may have the slower disk."""
_POLL = 0.02
_PREFIX = ".together-"


@dataclass(frozen=True, slots=True)
class Team:
    """The processes of a run, and a word they have agreed on, so that no file of an earlier run is taken for theirs."""

    rank: int = 0
    world: int = 1
    word: str = "alone"


class Meeting:
    """One save of a team."""

    def __init__(self, root: Path, team: Team, step: int, attempt: int, *, patience: float = PATIENCE) -> None:
        self._root = root
        self._team = team
        self._name = f"{_PREFIX}{team.word}-{step}-{attempt}"
        self._patience = patience

    def lead(self, folder: Path) -> None:
        """Said by the first process: write in here."""
        self._say("folder", {"folder": folder.name})

    def follow(self) -> Path:
        """Heard by the others."""
        told = self._hear("folder", "the first process to begin")
        name = str(told["folder"])
        if "/" in name or name in ("", ".", ".."):
            raise SaveFailed(f"{self._root} says to write in {name!r}, which is no folder of its own", kind="damaged")
        return self._root / name

    def done(self, entries: Mapping[str, Entry]) -> None:
        """Said by the others: this is what I wrote."""
        self._say(str(self._team.rank), {"files": {name: [e.size, e.xxh3_128] for name, e in entries.items()}})

    def failed(self, why: str) -> None:
        with suppress(OSError):
            self._say(str(self._team.rank), {"failed": why})

    def gather(self) -> dict[str, Entry]:
        """Heard by the first: what all the others wrote."""
        found: dict[str, Entry] = {}
        for rank in range(1, self._team.world):
            told = self._hear(str(rank), f"process {rank}")
            if "failed" in told:
                raise SaveFailed(f"process {rank} could not write its part: {told['failed']}")
            found |= {name: Entry(int(size), str(digits)) for name, (size, digits) in dict(told["files"]).items()}
        return found

    def over(self) -> None:
        """Remove what was said."""
        for file in self._root.glob(f"{self._name}.*"):
            with suppress(OSError):
                file.unlink()

    def _say(self, what: str, told: Mapping[str, Any]) -> None:
        path = self._root / f"{self._name}.{what}"
        draft = path.with_name(path.name + ".new")
        draft.write_text(json.dumps(told))
        os.replace(draft, path)

    def _hear(self, what: str, whom: str) -> dict[str, Any]:
        path = self._root / f"{self._name}.{what}"
        until = time.monotonic() + self._patience
        while time.monotonic() < until:
            with suppress(OSError, ValueError):
                return dict(json.loads(path.read_text()))
            time.sleep(_POLL)
        raise SaveFailed(f"waited {self._patience:.0f} s for {whom}. Do all processes write to the same disk?")


def forget(root: Path) -> None:
    """Remove what processes of an earlier time have said."""
    for file in root.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            file.unlink()
