"""What becomes of checkpoints, told in the journal and in the log."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from surefoot.guard.metrics_reader import MetricsReader
from surefoot.guard.step_pipeline import StepPipeline
from surefoot.records import EVENT_MARK, CheckpointEvent

log = logging.getLogger("surefoot")
_FINE = ("saved", "resumed", "proved", "exact_if")


class CheckpointEventLog:
    """Tells of one run; in the log all that is fine is told by the first process alone."""

    def __init__(self, desk: MetricsReader, rounds: StepPipeline) -> None:
        self._desk = desk
        self.rounds = rounds

    def tell(self, name: str, words: str, values: Mapping[str, Any] | None = None) -> None:
        rank = self._desk.journal.rank
        event = CheckpointEvent(
            step=self._desk.step,
            attempt=self.rounds.attempt,
            rank=rank,
            name=name,
            detail=words,
            values=dict(values or {}),
        )
        self._desk.journal.event(event)
        if rank == 0 or name not in _FINE:
            level = logging.INFO if name in _FINE else logging.WARNING
            log.log(level, "surefoot: %s", words, extra={EVENT_MARK: True})
