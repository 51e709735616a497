"""Watches one run directory and says what a person should hear of: for `surefoot alarms`, `surefoot watch`, and the
process that sends alarms beside a training."""

from __future__ import annotations

import time
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from surefoot.alarms.alarm import Alarm
from surefoot.alarms.alarm_rules import AlarmGroup, is_planned_end
from surefoot.alarms.alarm_target import AlarmLevel
from surefoot.alarms.run_follower import EventTails, LastSteps, WriterSign

POLL_SECONDS = 0.5
"""How often `RunWatch.poll` is meant to be called."""
_GROUP_SECONDS = 2.0
"""Events that come within this time are one alarm."""


class RunEnd(StrEnum):
    """How a run ended."""

    CLOSED = "closed"
    FAILED = "failed"
    GONE = "gone"


class RunWatch:
    """Call `poll` every `POLL_SECONDS`: it returns the alarms since the last call and sets `ended`.

    It reads only the ends of files, so it may run beside a training or on another host with the same disk.
    `no_step_minutes=0` never reports a run without steps. `since`: leave out events from before this time.
    """

    def __init__(self, run_dir: Path, *, no_step_minutes: float = 10.0, since: float | None = None) -> None:
        self.ended: RunEnd | None = None
        self.steps = LastSteps(run_dir)
        self._no_step = 60.0 * no_step_minutes
        self._events = EventTails(run_dir, since=time.time() if since is None else since)
        self._writer = WriterSign(run_dir)
        self._group = AlarmGroup()
        self._group_since: float | None = None
        self._stall_reported = False
        self._failed = False
        self._closed = False
        self._had_writer = False

    def poll(self, now: float | None = None) -> list[Alarm]:
        """The alarms since the last call; `now` is of `time.monotonic`."""
        now = time.monotonic() if now is None else now
        alive = self._writer.alive(now)  # before the events: what it wrote last is read after it
        new = self._events.read()
        for event in new:
            self._add(event, now)
        alarms = self._take_group(now, final=not new)
        alarms += self._stalled(now)
        self._had_writer = self._had_writer or alive is not None
        if self._closed and alive is not True:
            return [*alarms, *self._take_group(now, final=True), *self._finish()]
        if alive is False:
            return [*alarms, *self._take_group(now, final=True), *self.gone(self._writer.pid)]
        if alive is None and self._had_writer and not self._closed and self.ended is None:
            return [*alarms, *self.gone("the process")]
        return alarms

    def gone(self, who: str) -> list[Alarm]:
        """The process that trained is gone without having closed the run."""
        if self.ended is not None:
            return []
        self.ended = RunEnd.GONE
        text = (
            f"{who} ended without closing the run: it was killed, ran out of memory, or lost its machine. "
            f"{self.steps.in_words().capitalize()}."
        )
        return [self._alarm(AlarmLevel.CRASH, "gone", f"the training process is gone, {self.steps.in_words()}", text)]

    def failed(self, error: str) -> list[Alarm]:
        """The process ended with an error that no event tells of."""
        self._failed = True
        return [
            self._alarm(AlarmLevel.CRASH, "error", f"the training failed: {error}", f"{error}\n{self.steps.in_words()}")
        ]

    def note(self, title: str) -> list[Alarm]:
        """Something about the run that its journal cannot tell."""
        return [self._alarm(AlarmLevel.SEVERE, title[:40], title, "")]

    # -- inside

    def _add(self, event: Mapping[str, Any], now: float) -> None:
        if event["kind"] == "note" and event["rank"] == 0:
            match event.get("name"):
                case "attached":  # the same directory, resumed
                    self._closed = self._failed = self._stall_reported = False
                    self.ended, self.steps.seen_at = None, now
                case "closed":
                    self._closed = True
                case "exception" if not is_planned_end(event):
                    self._failed = True
        self._group.add(event)
        self._group_since = now if self._group_since is None else self._group_since

    def _take_group(self, now: float, *, final: bool) -> list[Alarm]:
        if self._group_since is None or not (final or now - self._group_since >= _GROUP_SECONDS):
            return []
        self._group_since = None
        alarm = self._group.take()
        return [] if alarm is None else [alarm]

    def _stalled(self, now: float) -> list[Alarm]:
        if self.steps.look(now):
            self._stall_reported = False
            return []
        quiet = now - self.steps.seen_at
        if not self._no_step or quiet < self._no_step or self._stall_reported or self._closed:
            return []
        self._stall_reported = True
        title = f"no step for {quiet / 60:.3g} minutes, {self.steps.in_words()}"
        text = (
            "The process is still there. It hangs, waits for data or another rank, or evaluates or saves for so long."
        )
        return [self._alarm(AlarmLevel.STALLED, "stalled", title, text)]

    def _finish(self) -> list[Alarm]:
        if self.ended is not None:
            return []
        self.ended = RunEnd.FAILED if self._failed else RunEnd.CLOSED
        if self._failed:
            return []
        return [self._alarm(AlarmLevel.END, "end", f"the run has ended, {self.steps.in_words()}", "")]

    def _alarm(self, level: AlarmLevel, key: str, title: str, text: str) -> Alarm:
        step = -1 if self.steps.row is None else self.steps.row.step
        return Alarm(level=level, key=f"{level} {key}", title=title, text=text or title, step=step)
