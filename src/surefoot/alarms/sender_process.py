"""The process that sends a training's alarms: `python -m surefoot.alarms.sender_process`, started by `alarm_process`.

It reads its settings as one line of JSON from standard input, because other users see the arguments of a process. Then
it follows the run directory, like any reader, until the training process has ended, however that happens. Lines for the
training's journal go to standard output.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

from surefoot.alarms.alarm import Alarm, AlarmedRun
from surefoot.alarms.alarm_target import AlarmLevel, AlarmTarget, alarm_targets
from surefoot.alarms.dispatcher import AlarmDispatcher
from surefoot.alarms.watch_run import POLL_SECONDS, RunWatch

END_SECONDS = 30.0
"""How long it may go on sending after the training has ended."""
_LAST_EVENTS_SECONDS = 3.0
"""How long it waits for the last events of a closed run; a disk may show them late."""


def main() -> None:
    _ignore_signals()
    lines: SimpleQueue[dict[str, Any] | None] = SimpleQueue()
    settings = json.loads(sys.stdin.readline())
    threading.Thread(target=_read_lines, args=(sys.stdin, lines), daemon=True).start()
    targets = alarm_targets(settings["targets"])
    run_dir = Path(settings["run_dir"])
    facts = AlarmedRun(name=run_dir.name, run_dir=str(run_dir), host=socket.gethostname())
    dispatcher = AlarmDispatcher(targets, facts, _report)
    no_step = shortest_no_step(targets)
    watch = RunWatch(run_dir, no_step_minutes=no_step, since=settings["since"], announced=True)
    _follow(watch, dispatcher, lines, parent=settings["parent"])
    dispatcher.close(END_SECONDS)
    os._exit(0)  # an attempt that hangs must not keep this process


def shortest_no_step(targets: tuple[AlarmTarget, ...]) -> float:
    """The shortest time without a step that any receiver wants to hear of; 0 for none."""
    wanted = [t.no_step_minutes for t in targets if AlarmLevel.STALLED in t.levels and t.no_step_minutes > 0]
    return min(wanted, default=0.0)


def _follow(
    watch: RunWatch, dispatcher: AlarmDispatcher, lines: SimpleQueue[dict[str, Any] | None], *, parent: int
) -> None:
    """Until the training process has closed the run or is gone."""
    while watch.ended is None:
        alarms: list[Alarm] = []
        gone = os.getppid() != parent
        message = _next_message(lines)  # what it said last arrives a moment after it is gone
        alarms += watch.poll()
        if message is not None and "journal" in message:
            alarms += watch.note(f"the journal has stopped, training goes on unrecorded: {message['journal']}")
        if message is not None and "end" in message:
            alarms += _last_alarms(watch, message["end"])
        elif gone:
            alarms += watch.poll()  # what it wrote last
            alarms += watch.finish() if watch.closed else watch.gone(f"process {parent}")
        for alarm in alarms:
            dispatcher.submit(alarm)


def _last_alarms(watch: RunWatch, error: str | None) -> list[Alarm]:
    """The training has closed the run; `error` is what ended it, if anything did."""
    alarms: list[Alarm] = []
    until = time.monotonic() + _LAST_EVENTS_SECONDS
    while not watch.closed and time.monotonic() < until:
        alarms += watch.poll()
        time.sleep(0.05)
    alarms += watch.poll()
    return [*alarms, *(watch.failed(error) if error else ()), *watch.finish()]


def _next_message(lines: SimpleQueue[dict[str, Any] | None]) -> dict[str, Any] | None:
    """What the training process says, if it says something within the time between two polls."""
    try:
        return lines.get(timeout=POLL_SECONDS)
    except Empty:
        return None


def _read_lines(source: IO[str], lines: SimpleQueue[dict[str, Any] | None]) -> None:
    for line in source:
        try:
            lines.put(json.loads(line))
        except ValueError:
            continue  # torn by a kill
    # Its end proves nothing: processes forked by the training hold the pipe open, or close it. The parent's pid does.


def _report(sentence: str) -> None:
    try:
        print(sentence, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nobody reads any more


def _ignore_signals() -> None:
    """Signals meant for the training also reach us; we end when it has ended."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if (number := getattr(signal, name, None)) is not None:
            signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
