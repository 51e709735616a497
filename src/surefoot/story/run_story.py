"""The story of a whole run as data: how it ended, its incidents, its losses, what was saved."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from surefoot.story.incident_story import IncidentLevel, IncidentStory, plain_story


class RunVerdict(StrEnum):
    """The run in one word."""

    HEALTHY = "healthy"
    WARNING = "warning"
    """Updates were refused or the run was changed, and it went on well."""
    FAILED = "failed"
    """It was stopped, ended in an error, or ended in trouble."""
    RUNNING = "running"
    KILLED = "killed"
    """Its process is gone and has not closed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedCheckpoint:
    """A checkpoint on disk, or one that was written and is kept no more."""

    step: int
    time: float
    on_disk: bool
    health: str = ""
    """What is marked about it; empty where nothing is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedWork:
    """What protecting the run has done for it, in counts."""

    refused: int = 0
    """Updates that were refused before they reached the weights."""
    rewinds: int = 0
    updates_lost: int = 0
    """Applied updates that rewinds have undone."""
    updates_kept: int = 0
    """Updates that were trained again after a trial, and so not lost."""
    resumes: int = 0

    def sentence(self) -> str:
        """The counts in words; empty where there is nothing to tell."""
        lost = f" ({self.updates_lost:,} {_plural('update', self.updates_lost)} lost)" if self.updates_lost else ""
        counts = [
            (self.refused, f"bad {_plural('update', self.refused)} refused"),
            (self.rewinds, f"{_plural('rewind', self.rewinds)}{lost}"),
            (self.updates_kept, f"{_plural('update', self.updates_kept)} trained again instead of lost"),
            (self.resumes, _plural("resume", self.resumes)),
        ]
        return ", ".join(f"{count:,} {what}" for count, what in counts if count)


def _plural(noun: str, count: int) -> str:
    return noun if count == 1 else f"{noun}s"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStory:
    """What happened in a run; `surefoot.read(run_dir).story`."""

    path: str
    verdict: RunVerdict
    health: RunVerdict
    """healthy, warning or failed, whether the run goes on, was killed, or has ended."""
    headline: str
    """The run in one line."""
    ended: str
    """How it ended, or that it has not, in words."""
    started: float = 0.0
    updated: float = 0.0
    """Time of the newest row or event."""
    last_step: int | None = None
    """Applied updates."""
    attempts: int = 0
    first_loss: float | None = None
    last_loss: float | None = None
    """The newest finite loss of an applied update."""
    best_eval_loss: float | None = None
    last_eval_loss: float | None = None
    ranks: int = 1
    incidents: tuple[IncidentStory, ...] = ()
    """In order, with those that were only suspected or reported."""
    checkpoints: tuple[SavedCheckpoint, ...] = ()
    saved: SavedWork = SavedWork()
    notes: tuple[str, ...] = ()
    """What is missing or damaged in the run directory."""

    @property
    def main(self) -> IncidentStory | None:
        """The incident that the verdict rests on: where the run was stopped or did not recover, else the first in
        which something was done."""
        by_level = {level: [i for i in self.incidents if i.level is level] for level in IncidentLevel}
        if by_level[IncidentLevel.STOPPED]:
            return by_level[IncidentLevel.STOPPED][-1]
        done = [*by_level[IncidentLevel.ACTED], *by_level[IncidentLevel.REFUSED]]
        if self.health is RunVerdict.FAILED and done:
            last = max(done, key=lambda incident: incident.attempt)
            if last.helped is not True:
                return last
        return done[0] if done else None

    def as_json(self) -> dict[str, Any]:
        """Plain values, with the main incident by its place in the list."""
        main = self.main
        place = None if main is None else self.incidents.index(main)
        return plain_story(self) | {"main": place}
