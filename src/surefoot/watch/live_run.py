"""One run, followed at a cursor: what was read once is never read again."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from surefoot.journal.pyramid_reader import PyramidReader
from surefoot.journal.run_json import RUN_JSON, SIGNALS_DIR
from surefoot.journal.strict_json import loads_object
from surefoot.logs.report.wording import clean
from surefoot.records import NAN
from surefoot.watch.current_numbers import CurrentNumbers, current_numbers
from surefoot.watch.event_tail import EventLine, EventLines, EventTail
from surefoot.watch.mapped_facts import MappedFacts
from surefoot.watch.run_state import Liveness, RunState, StateReport
from surefoot.watch.run_verdict import LiveIncidents, LiveVerdict, verdict_of


class LiveRun:
    """The present content of a run directory; `refresh` takes in what was written since.

    A directory that was deleted keeps what was read; one that was made again is read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._liveness = Liveness(path)
        self.version = 0
        """Grows with every change."""
        self._open()

    def _open(self) -> None:
        self._identity = _identity(self.path)
        self.info = self._read_info()
        self.scalars = PyramidReader(self.path / SIGNALS_DIR, "scalars")
        self._layers: PyramidReader | None = None
        self._tail = EventTail(self.path)
        self._lines = EventLines()
        self._incidents = LiveIncidents()
        self.total_steps = NAN
        self._take_in_events()
        self.state: StateReport = self._liveness.check()
        self.numbers: CurrentNumbers = self._current_numbers()
        self.verdict: LiveVerdict = self._verdict()

    @property
    def layers(self) -> PyramidReader:
        """Opened by the first look at it."""
        if self._layers is None:
            self._layers = PyramidReader(self.path / SIGNALS_DIR, "layers")
        return self._layers

    @property
    def events(self) -> list[dict[str, Any]]:
        return self._tail.events

    @property
    def lines(self) -> list[EventLine]:
        """The events in words, oldest first."""
        return self._lines.lines

    @property
    def name(self) -> str:
        return clean(self.path.name, 120)

    def refresh(self) -> bool:
        """Take in what was written since; True if anything changed."""
        state = self._liveness.check()
        if state.state is RunState.DELETED:
            return self._changed(state, False)
        if _identity(self.path) != self._identity:
            self._open()
            self.version += 1
            return True
        grew = False
        with contextlib.suppress(OSError):  # a network disk that does not answer: try again at the next refresh
            grew = self.scalars.refresh()
            if self._layers is not None:
                self._layers.refresh()
            grew = self._take_in_events() or grew
            if state.state is not self.state.state:
                self.info = self._read_info()
        return self._changed(state, grew)

    def _changed(self, state: StateReport, grew: bool) -> bool:
        if not grew and state == self.state:
            return False
        self.state = state
        self.numbers = self._current_numbers()
        self.verdict = self._verdict()
        self.version += 1
        return True

    def _verdict(self) -> LiveVerdict:
        rows = MappedFacts(self.scalars.segments)
        return verdict_of(self._tail.events, self._incidents.tell(rows), rows, self.numbers, self.state)

    def _current_numbers(self) -> CurrentNumbers:
        environment = self.info.get("environment")
        device = str(environment.get("device", "cpu")) if isinstance(environment, dict) else "cpu"
        on_accelerator = not device.startswith("cpu")
        return current_numbers(self.scalars.segments, self.total_steps, on_accelerator=on_accelerator)

    def _take_in_events(self) -> bool:
        new = self._tail.refresh()
        if self._tail.rearranged:
            self._incidents = LiveIncidents()
        self._incidents.take_in(self._tail.events if self._tail.rearranged else new)
        for event in new:
            self._lines.add(event)
            values = event.get("values")
            if event.get("name") == "report" and isinstance(values, dict):
                total = values.get("total_steps")
                self.total_steps = float(total) if isinstance(total, int | float) else self.total_steps
        return bool(new)

    def _read_info(self) -> dict[str, Any]:
        try:
            return loads_object((self.path / RUN_JSON).read_bytes()) or {}
        except OSError:
            return {}

    def undone(self) -> list[tuple[int, int]]:
        """The attempts that rewinds have undone, as ranges."""
        ranges = []
        for event in self._tail.events:
            values = event.get("values")
            if event.get("name") == "rewound" and isinstance(values, dict):
                back = values.get("attempt")
                if isinstance(back, int) and back < event["attempt"]:
                    ranges.append((back + 1, event["attempt"]))
        return ranges


def _identity(path: Path) -> tuple[int, int] | None:
    """Tells a run directory from another one made later at the same place."""
    try:
        status = (path / SIGNALS_DIR).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
