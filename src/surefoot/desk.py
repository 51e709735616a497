"""Where numbers are read: a row is made, written down and judged, and what was decided is carried out."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from surefoot.act.stop import Stop
from surefoot.journal.writer import Journal
from surefoot.judge.history import History
from surefoot.judge.judge import Judge
from surefoot.judge.policy import Policy
from surefoot.measure.meter import Block
from surefoot.measure.resources import Clock
from surefoot.records import NAN, Decision, Note, Row, Verdict
from surefoot.rows import Tag, row_from, worst_tensors

log = logging.getLogger("surefoot")


class Desk:
    """Reads each block exactly once, in order; the only place that knows how many updates have landed."""

    def __init__(self, journal: Journal, *, policy: Policy, clock: Clock) -> None:
        self.journal = journal
        self.step = 0
        self.total = NAN
        """Steps the whole run will have, if the user has told."""
        self.history = History()
        self._judge = Judge(policy)
        self._observes = policy.observe
        self._clock = clock
        self._landed = -1
        self._attempt = -1

    def read(self, block: Block[np.ndarray], tag: Tag, names: Sequence[str]) -> None:
        """Take in the numbers of one attempted update."""
        again = tag.attempt == self._landed  # another optimizer's part of an update that has landed already
        left = self._clock.left(self.total - self.step)
        repeated, self._attempt = tag.attempt == self._attempt, tag.attempt
        row = row_from(block, tag, step=self.step - again, history=self.history, left=left, repeated=repeated)
        layers = block.stats
        self.journal.row(row, layers)
        if (row.landed or (self._observes and row.verdict < Verdict.OVERFLOW)) and not again:
            self.step += 1
            self._landed = tag.attempt
        for event in self._judge.update(row):
            if self.journal.rank == 0:  # all processes judge alike, one writes it down
                self.journal.event(event)
            if isinstance(event, Decision):
                self._carry_out(event, row, names, layers)

    def _carry_out(self, decision: Decision, row: Row, names: Sequence[str], layers: np.ndarray) -> None:
        if decision.action == "refuse" and self.journal.rank == 0:
            done = "refused" if decision.applied else "would have been refused"
            log.warning("surefoot: update %d (attempt %d) %s: %s", row.step, row.attempt, done, decision.reason)
            self.note(
                "tensors",
                "where the gradients stood out",
                at=row,
                values={"tensors": worst_tensors(names, layers, row)},
            )
        elif decision.action == "stop" and decision.applied:
            self.journal.flush()
            Stop(decision.reason).apply()

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
