"""Sends alarms to every receiver that wants them, each in a thread of its own, within its limits."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence

from surefoot.alarms.alarm import Alarm, AlarmedRun
from surefoot.alarms.alarm_limits import BACKOFF_SECONDS, AlarmLimits
from surefoot.alarms.alarm_target import AlarmTarget
from surefoot.alarms.send_alarm import NotSent, send

_QUEUE = 256
"""Alarms that wait for a receiver; what comes while it is full is counted in its next summary."""
_SUMMARY_CHECK_SECONDS = 1.0

Report = Callable[[str], None]
"""Receives one sentence for each receiver that begins or stops to fail."""


class AlarmDispatcher:
    """Never blocks its caller: `submit` puts into bounded queues."""

    def __init__(self, targets: Sequence[AlarmTarget], run: AlarmedRun, report: Report) -> None:
        self._threads = [_TargetThread(target, run, report) for target in targets]
        for thread in self._threads:
            thread.start()

    def submit(self, alarm: Alarm) -> None:
        for thread in self._threads:
            if alarm.level in thread.target.levels:
                thread.submit(alarm)

    def close(self, seconds: float) -> bool:
        """Send what waits and what was held back, for at most so long; whether all of it was tried."""
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.ending.set()
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


class _TargetThread(threading.Thread):
    def __init__(self, target: AlarmTarget, run: AlarmedRun, report: Report) -> None:
        super().__init__(name="surefoot-alarm-target", daemon=True)
        self.target, self._run, self._report = target, run, report
        self.ending = threading.Event()
        self._queue: queue.Queue[Alarm] = queue.Queue(_QUEUE)
        self._overflow: queue.SimpleQueue[Alarm] = queue.SimpleQueue()
        self._limits = AlarmLimits(target)
        self._failing = False

    def submit(self, alarm: Alarm) -> None:
        try:
            self._queue.put_nowait(alarm)
        except queue.Full:
            if self._overflow.qsize() < (4 if alarm.urgent else 1) * _QUEUE:
                self._overflow.put(alarm)

    def run(self) -> None:
        while True:
            try:
                alarm = self._queue.get(timeout=0.05 if self.ending.is_set() else _SUMMARY_CHECK_SECONDS)
            except queue.Empty:
                if self._take_overflow():
                    continue
                last = self.ending.is_set()
                if self._limits.summary_due(time.time(), last=last):
                    self._deliver(self._limits.take_summary(time.time()), last=last)
                if last and self._queue.empty():  # one attempt is enough: the process is about to end
                    return
            else:
                if self._limits.admits(alarm, time.time()):
                    self._deliver(alarm)

    def _take_overflow(self) -> bool:
        """Count what did not fit into the queue; whether there was any."""
        found = False
        while not self._overflow.empty():
            self._limits.hold(self._overflow.get(), time.time())
            found = True
        return found

    def _deliver(self, alarm: Alarm, *, last: bool = False) -> None:
        """Attempt to send, with pauses in between; every attempt counts as a request."""
        payload, why = alarm.payload(self._run), NotSent("")
        for pause in (*BACKOFF_SECONDS, None):
            if not self._limits.may_request(time.time(), urgent=alarm.urgent or last):
                break
            self._limits.requested(time.time())
            try:
                send(self.target, payload)
            except NotSent as error:
                why = error
            else:
                self._limits.sent(alarm, time.time())
                self._tell(failing=False, why="")
                return
            if why.final or last or pause is None:
                break
            self.ending.wait(pause)
        self._limits.not_sent(alarm, time.time())
        self._tell(failing=True, why=str(why))

    def _tell(self, *, failing: bool, why: str) -> None:
        if failing and not self._failing:
            self._report(f"alarms do not reach {self.target.name}: {why}")
        elif self._failing and not failing:
            self._report(f"alarms reach {self.target.name} again")
        self._failing = failing
