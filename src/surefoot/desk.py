"""Where numbers are read: a row is made, written down and judged, and what was decided is told."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from surefoot.gate.decide import Said
from surefoot.journal.writer import Journal
from surefoot.judge.history import History
from surefoot.judge.judge import Judge
from surefoot.judge.policy import Policy
from surefoot.measure.meter import Arrived
from surefoot.measure.origin import Origin
from surefoot.measure.resources import Clock
from surefoot.measure.summary import Head
from surefoot.records import NAN, TOLD, Action, Decision, Event, Note, Outcome, Row, Verdict
from surefoot.rows import Tag, row_from, worst_tensors

log = logging.getLogger("surefoot")


class Desk:
    """Reads each block exactly once, in order; the only place that knows how many updates have landed."""

    def __init__(self, journal: Journal, judge: Judge, *, policy: Policy, clock: Clock) -> None:
        self.journal = journal
        self.step = 0
        self.total = NAN
        """Steps the whole run will have, if the user has told."""
        self.history = History()
        self.judge = judge
        self.alive = math.inf
        """The fewest processes that were seen to measure."""
        self.busy = False
        """Whether a process was at a save at the attempt that was read last, or that is not known."""
        self._observes = policy.observe
        self._clock = clock
        self._landed = -1
        self._stops = 0
        """Times the run was stopped since an update landed."""
        self.attempt = -1
        """The last one that was read."""
        self.last: Row | None = None

    def read(self, block: Arrived, tag: Tag, *, judged: bool = True) -> list[Decision]:
        """Take in the numbers of one attempted update; what is to be done is handed back."""
        again = tag.attempt == self._landed  # another optimizer's part of an update that has landed already
        row = row_from(
            block,
            tag,
            step=self.step - again,
            history=self.history,
            left=self._clock.left(self.total - self.step),
            repeated=tag.attempt == self.attempt,
        )
        self.attempt, self.last = tag.attempt, row
        layers = block.stats
        self.alive = min(self.alive, block.verdict[Said.ALIVE])
        self.busy = block.head[Head.BUSY] != 0
        self.journal.row(row, layers)
        if (row.landed or (self._observes and row.verdict < Verdict.OVERFLOW)) and not again:
            self.step += 1
            self._landed = tag.attempt
            self._stops = 0
        events = self.judge.update(row, layers) if judged else []
        if not events:
            return []
        if self.journal.rank == 0:  # all processes judge alike, one tells
            for event in self._worth_telling(events):
                self.journal.event(event)
                self._tell(event, row, layers)
        return [e for e in events if isinstance(e, Decision) and e.applied]

    def _worth_telling(self, events: list[Event]) -> list[Event]:
        """A loop that goes on after it was stopped is stopped again each time, which is not told each time."""
        if not any(isinstance(e, Decision) and e.action is Action.STOP for e in events):
            return events
        self._stops += 1
        often = self._stops & (self._stops - 1)
        return [e for e in events if not (often and isinstance(e, Decision) and e.action is Action.STOP)]

    def _tell(self, event: Event, row: Row, layers: np.ndarray) -> None:
        if isinstance(event, Outcome):
            log.info("surefoot: step %d: %s: %s", event.step, event.action, event.detail)
        elif isinstance(event, Decision) and event.action is Action.REFUSE:
            done = "refused" if event.applied else "would have been refused"
            told = row.step, row.attempt, done, event.reason
            log.warning("surefoot: update %d (attempt %d) %s: %s", *told, extra={TOLD: True})
            worst = worst_tensors(self.judge.names, layers, row)
            self.note("tensors", "where the gradients stood out", at=row, values={"tensors": worst})
        elif isinstance(event, Decision) and not event.applied:
            log.info("surefoot: step %d: %s; would have been done: %s", event.step, event.reason, event.rung)

    def locate(self, row: Row, origin: Origin) -> None:
        """It was found out where in the model this row's trouble began."""
        told = {"inputs": origin.inputs, "weights": origin.weights}
        for event in self.judge.located(row, origin.module, origin.kind, **told):
            if self.journal.rank == 0:
                self.journal.event(event)

    def went_back(self, attempt: int, step: int) -> None:
        """The run is again as it was after this attempt."""
        self.step, self._landed = step, -1
        self.judge.rewound(attempt, step)

    def note(
        self,
        name: str,
        detail: str = "",
        *,
        at: Row | None = None,
        values: Mapping[str, Any] | None = None,
        attempt: int = 0,
    ) -> None:
        """Write a note into the journal."""
        step, attempt = (self.step, attempt) if at is None else (at.step, at.attempt)
        rank = self.journal.rank
        self.journal.event(
            Note(step=step, attempt=attempt, rank=rank, name=name, detail=detail, values=dict(values or {}))
        )
