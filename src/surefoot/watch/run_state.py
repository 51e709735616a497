"""Whether the process behind a run still lives, from its lock."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from surefoot.journal.lock import owner_is_running, read_owner

_MISSED_BEATS = 5
_MIN_SILENCE = 10.0
"""Seconds without a heartbeat after which a run on another host counts as dead."""


class RunState(StrEnum):
    """What the process of a run is doing."""

    RUNNING = "running"
    ENDED = "ended"
    DIED = "died"
    """The lock is still there, but its owner is gone."""
    DELETED = "deleted"


@dataclass(frozen=True, slots=True)
class StateReport:
    """A state, and in words what it rests on."""

    state: RunState
    detail: str


class Liveness:
    """Watches the lock of a run; the clocks of two hosts are never compared."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._beat: Any = None
        self._changed = time.monotonic()

    def check(self) -> StateReport:
        try:
            if not self._run_dir.is_dir():
                return StateReport(RunState.DELETED, f"{self._run_dir} was deleted")
            owner = read_owner(self._run_dir)
        except OSError as error:  # a network disk that does not answer for a moment
            return StateReport(RunState.RUNNING, f"cannot read the lock: {error.strerror}")
        if not owner:
            return StateReport(RunState.ENDED, "the run has closed its record")
        who = f"process {owner.get('pid', '?')} on {owner.get('host', 'an unknown host')}"
        running = owner_is_running(owner)
        if running is not None:
            words = "is running" if running else "is gone, and has not closed its record"
            return StateReport(RunState.RUNNING if running else RunState.DIED, f"{who} {words}")
        return self._by_heartbeat(owner, who)

    def _by_heartbeat(self, owner: dict[str, Any], who: str) -> StateReport:
        beat = (owner.get("token"), owner.get("beats"))
        if beat != self._beat:
            self._beat, self._changed = beat, time.monotonic()
        interval = owner.get("interval")
        interval = min(max(float(interval), 0.1), 60.0) if isinstance(interval, int | float) else 2.0
        silence = time.monotonic() - self._changed
        if silence > max(_MIN_SILENCE, _MISSED_BEATS * interval):
            return StateReport(RunState.DIED, f"{who} has sent no heartbeat for {silence:.0f} s")
        return StateReport(RunState.RUNNING, f"{who} sends heartbeats")
