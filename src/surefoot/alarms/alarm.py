"""One alarm, and the JSON that its receiver gets."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from surefoot import __version__
from surefoot.alarms.alarm_target import AlarmLevel

URGENT = (AlarmLevel.CRASH, AlarmLevel.STOP)
"""Levels for which some of the requests of an hour are kept free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmedRun:
    """Which run an alarm is about."""

    name: str
    run_dir: str
    host: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """What happened, in words and as events."""

    level: AlarmLevel
    key: str
    """Alarms with the same key say the same."""
    title: str
    text: str = ""
    step: int = -1
    rank: int = 0
    time: float = field(default_factory=time.time)
    events: tuple[Mapping[str, Any], ...] = ()
    """The events of the journal behind it."""

    @property
    def urgent(self) -> bool:
        return self.level in URGENT

    def payload(self, run: AlarmedRun) -> dict[str, Any]:
        """The JSON object of a webhook or command; fields are only ever added."""
        return {
            "source": "surefoot",
            "version": __version__,
            "level": self.level.value,
            "run": run.name,
            "run_dir": run.run_dir,
            "host": run.host,
            "step": self.step,
            "rank": self.rank,
            "time": datetime.fromtimestamp(self.time, UTC).isoformat(timespec="seconds"),
            "title": f"{run.name}: {self.title}",
            "text": self.text,
            "events": [dict(event) for event in self.events],
        }
