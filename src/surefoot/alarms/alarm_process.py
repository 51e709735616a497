"""The training's side of the process that sends alarms: starts it, and tells it how the training ended."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import surefoot
from surefoot.alarms.alarm_target import ALARMS_VARIABLE, AlarmTarget
from surefoot.journal.writer import Item, Journal
from surefoot.records import Note

log = logging.getLogger("surefoot")
Report = Callable[[str], None]


def start_alarms(targets: Sequence[AlarmTarget], journal: Journal) -> None:
    """On the first rank, start the process that sends the alarms of this journal's run; it ends with the journal."""
    if not targets or journal.rank != 0:
        return

    def report(sentence: str) -> None:
        log.warning("surefoot: %s", sentence)
        journal.event(Note(step=-1, attempt=-1, name="alarms", detail=sentence))

    try:
        journal.companions.append(AlarmProcess(targets, journal.run_dir, report))
    except OSError as error:
        report(f"no alarms are sent, because their process cannot be started: {error}")


class AlarmProcess:
    """Never raises after its start and never waits: the process follows the run directory by itself."""

    def __init__(self, targets: Sequence[AlarmTarget], run_dir: Path, report: Report) -> None:
        """Start it; `report` receives a sentence when a receiver begins or stops to fail. Raises OSError."""
        self._pid = os.getpid()
        self._closed = False
        # Not a fork: a forked copy would share the training's memory, threads and device.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "surefoot.alarms.sender_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a traceback could show an address
            env=_environment(),
            start_new_session=True,  # a Ctrl-C in the terminal is for the training
        )
        assert process.stdin is not None
        self._stdin = process.stdin
        self.pid = process.pid
        settings = {
            "targets": [target.as_plain() for target in targets],
            "run_dir": str(run_dir),
            "since": time.time() - 1.0,
            "parent": self._pid,
        }
        self._tell(settings)
        threading.Thread(target=_listen, args=(process, report), name="surefoot-alarms", daemon=True).start()

    def received(self, items: Sequence[Item]) -> None:
        """Nothing to do: the process reads what is written."""

    def journal_failed(self, reason: str) -> None:
        """The run directory will show nothing any more."""
        self._tell({"journal": reason})

    def close(self) -> None:
        """The run is closed: the process sends what is left, for half a minute at most, and ends by itself."""
        if not self._closed and os.getpid() == self._pid:
            self._closed = True
            self._tell({"end": _error_that_ends_python()})
            with contextlib.suppress(OSError):  # it has ended
                self._stdin.close()

    def _tell(self, message: dict[str, object]) -> None:
        # A few hundred bytes to a pipe that holds 64 kB: this does not wait, whatever the reader does.
        try:
            self._stdin.write(json.dumps(message).encode("ascii") + b"\n")
            self._stdin.flush()
        except (OSError, ValueError):  # it has ended, or was told to
            pass


def _environment() -> dict[str, str]:
    """Ours, with this surefoot on the path and without the addresses."""
    root = str(Path(surefoot.__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), root)))
    return {name: value for name, value in os.environ.items() if name != ALARMS_VARIABLE} | {"PYTHONPATH": path}


def _listen(process: subprocess.Popen[bytes], report: Report) -> None:
    """Pass on what the process says, then collect it, so that it does not stay as a zombie."""
    assert process.stdout is not None
    for line in process.stdout:
        report(line.decode("utf-8", "replace").strip())
    process.stdout.close()
    if process.wait() != 0:
        report(f"the process that sends alarms has ended (exit code {process.returncode}): no more alarms are sent")


def _error_that_ends_python() -> str | None:
    """The exception that nobody caught, if Python is ending because of it."""
    error = getattr(sys, "last_value", None)
    interactive = getattr(sys, "ps1", None) is not None  # there it may be of an earlier cell
    stopped = type(error).__name__ == "TrainingStopped"  # an event tells of that
    return None if error is None or interactive or stopped else f"{type(error).__name__}: {error}"
