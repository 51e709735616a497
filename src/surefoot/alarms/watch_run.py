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
    `announced`: the training itself says when and how it has ended, and `finish` or `gone` is called then.
    """

    def __init__(
        self, run_dir: Path, *, no_step_minutes: float = 10.0, since: float | None = None, announced: bool = False
    ) -> None:
        self.ended: RunEnd | None = None
        self.closed = False
        """The journal says that the run was closed."""
        self.steps = LastSteps(run_dir)
        self._no_step = 60.0 * no_step_minutes
        self._announced = announced
        self._events = EventTails(run_dir, since=time.time() if since is None else since)
        self._writer = WriterSign(run_dir)
        self._had_writer = False
        self._group = AlarmGroup()
        self._group_since: float | None = None
        self._stall_reported = False
        self._failed = False

    @property
    def has_writer(self) -> bool:
        """Whether a process holds the run directory now, dead or alive."""
        return self._writer.alive(time.monotonic()) is not None

    def poll(self, now: float | None = None) -> list[Alarm]:
        """The alarms since the last call; `now` is of `time.monotonic`."""
        now = time.monotonic() if now is None else now
        alive = self._writer.alive(now)  # before the events: what it wrote last is read after it
        new = self._events.read()
        for event in new:
            self._add(event, now)
        alarms = [*self._take_group(now, final=not new), *self._stalled(now)]
        self._had_writer = self._had_writer or alive is not None
        if self._announced or alive or not (self._had_writer or self.closed):
            return alarms
        alarms += self._take_group(now, final=True)
        return alarms + (self.finish() if self.closed else self.gone(self._writer.owner))

    def gone(self, who: str) -> list[Alarm]:
        """The process that trained is gone without having closed the run."""
        if self.ended is not None:
            return []
        self.ended, last = RunEnd.GONE, self.steps.in_words()
        text = f"{who} ended without closing the run: it was killed, ran out of memory, or lost its machine; {last}"
        return [self._alarm(AlarmLevel.CRASH, "gone", f"the training process is gone, {last}", text)]

    def failed(self, error: str) -> list[Alarm]:
        """The process ended with an error that no event tells of."""
        self._failed = True
        text = f"{error}\n{self.steps.in_words()}"
        return [self._alarm(AlarmLevel.CRASH, "error", f"the training failed: {error}", text)]

    def finish(self) -> list[Alarm]:
        """The run was closed, and its writer is gone."""
        if self.ended is not None:
            return []
        self.ended = RunEnd.FAILED if self._failed else RunEnd.CLOSED
        if self._failed:
            return []
        return [self._alarm(AlarmLevel.END, "end", f"the run has ended, {self.steps.in_words()}")]

    def note(self, title: str) -> list[Alarm]:
        """Something about the run that its journal cannot tell."""
        return [self._alarm(AlarmLevel.SEVERE, title, title)]

    # -- inside

    def _add(self, event: Mapping[str, Any], now: float) -> None:
        if event["kind"] == "note" and event["rank"] == 0:
            match event.get("name"):
                case "attached":  # the same directory, resumed
                    self.closed = self._failed = self._stall_reported = False
                    self.ended, self.steps.seen_at = None, now
                case "closed":
                    self.closed = True
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
        waited = now - self.steps.seen_at
        if not self._no_step or waited < self._no_step or self._stall_reported or self.closed:
            return []
        self._stall_reported = True
        title = f"no step for {waited / 60:.3g} minutes, {self.steps.in_words()}"
        text = f"{title}. The process is there: it hangs, waits for data or a rank, or evaluates or saves for so long."
        return [self._alarm(AlarmLevel.STALLED, "stalled", title, text)]

    def _alarm(self, level: AlarmLevel, key: str, title: str, text: str = "") -> Alarm:
        step = -1 if self.steps.row is None else self.steps.row.step
        return Alarm(level=level, key=f"{level} {key}", title=title, text=text or title, step=step)
