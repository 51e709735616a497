"""Where numbers are read: a row is made, written down and judged, and what was decided is told."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from surefoot.guard.iteration_order import IterationOrder
from surefoot.guard.step_metrics import StepContext, bad_buffers, step_metrics_from, worst_tensors
from surefoot.journal.writer import Journal
from surefoot.judge.history import History
from surefoot.judge.multi_optimizer import AnyJudge
from surefoot.judge.policy import Policy
from surefoot.measure.block_layout import HostBlock, SharedSlot, SummarySlot, VerdictSlot
from surefoot.measure.nan_tracer import NanOrigin
from surefoot.measure.system import StepTimer
from surefoot.records import EVENT_MARK, NAN, Action, Decision, Event, Note, Outcome, StepMetrics, Verdict

log = logging.getLogger("surefoot")


class MetricsReader:
    """Reads each block exactly once, in order; the only place that knows how many iterations have landed."""

    def __init__(
        self,
        journal: Journal,
        judge: AnyJudge,
        *,
        policy: Policy,
        clock: StepTimer,
        order: IterationOrder | None = None,
        steps_of: int | None = None,
    ) -> None:
        self.journal = journal
        self.order = order or IterationOrder(1)
        self._steps_of = steps_of
        """The optimizer whose landed updates are the steps; None where a step is an iteration of the loop."""
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
        self._completed = 0
        """Iterations that were known to have ended when the last row was sent."""
        self._open = 0
        """Updates that landed and belong to no iteration that was counted."""
        self._stops = 0
        """Times the run was stopped since an update landed."""
        self.attempt = -1
        """The last one that was read."""
        self.known = -1
        """The last one of which every row was read: other optimizers that step on the same backward bring one, too."""
        self.last: StepMetrics | None = None

    def read(self, block: HostBlock, tag: StepContext, *, judged: bool = True) -> list[Decision]:
        """Take in the numbers of one attempted update; what is to be done is handed back."""
        self._count_completed(tag.completed)
        row = step_metrics_from(
            block,
            tag,
            step=self.step,
            history=self.history.of(tag.optimizer),
            run=self.history,
            repeated=tag.attempt == self.attempt,
            left=self._clock.seconds_for(self.total - self.step),
        )
        self.attempt, self.last = tag.attempt, row
        self.known = tag.attempt if tag.ends else tag.attempt - 1
        layers = block.stats
        self.alive = min(self.alive, block.verdict[VerdictSlot.ACTIVE_RANKS])
        self.busy = block.summary[SummarySlot.RANKS_SAVING] != 0
        self.journal.row(row, layers)
        if row.applied or (self._observes and row.verdict < Verdict.OVERFLOW):
            self._open += 1
            self.step += tag.optimizer == self._steps_of
            self._stops = 0
        self._count_completed(tag.completed + tag.ends)
        # Where the gradients of the ranks differ after backward, so do the numbers of the layers: none may act on them.
        synced = len(block.rank_losses) < 2 or not block.shared[SharedSlot.GRADS_DIFFER] > 0
        events = self.judge.update(row, layers if synced else None) if judged else []
        if not events:
            return []
        if self.journal.rank == 0:  # all processes judge alike, one tells
            for event in self._worth_telling(events):
                self.journal.event(event)
                self._tell(event, row, block)
        return [e for e in events if isinstance(e, Decision) and e.applied]

    def _count_completed(self, completed: int) -> None:
        """An iteration counts as a step when at least one of its updates has landed."""
        if completed <= self._completed:
            return
        if self._steps_of is None:
            self.step += min(completed - self._completed, self._open)
        self._completed, self._open = completed, 0

    def finish_iteration(self) -> None:
        """The loop is over: what has landed since the last known end of an iteration is one, too; or as many as there
        were updates, where only one optimizer has stepped at all."""
        self._count_completed(self._completed + (1 if self.order.several else self._open))

    def _worth_telling(self, events: list[Event]) -> list[Event]:
        """A loop that goes on after it was stopped is stopped again each time, which is not told each time."""
        if not any(isinstance(e, Decision) and e.action is Action.STOP for e in events):
            return events
        self._stops += 1
        often = self._stops & (self._stops - 1)
        return [e for e in events if not (often and isinstance(e, Decision) and e.action is Action.STOP)]

    def _tell(self, event: Event, row: StepMetrics, block: HostBlock) -> None:
        if isinstance(event, Outcome):
            log.info("surefoot: step %d: %s: %s", event.step, event.action, event.detail)
        elif isinstance(event, Decision) and event.action is Action.REFUSE:
            done = "refused" if event.applied else "would have been refused"
            told = row.step, row.attempt, done, event.reason
            log.warning("surefoot: update %d (attempt %d) %s: %s", *told, extra={EVENT_MARK: True})
            worst = worst_tensors(self.judge.names, block.stats, row)
            if worst or not row.nonfinite_buffers > 0:
                self.note("tensors", "where the gradients stood out", at=row, values={"tensors": worst})
            if row.nonfinite_buffers > 0:
                bad = bad_buffers(self.judge.buffers, block.buffer_nonfinite)
                self.note("buffers", "buffers that the batch made non-finite", at=row, values={"buffers": bad})
        elif isinstance(event, Decision) and not event.applied:
            log.info("surefoot: step %d: %s; would have been done: %s", event.step, event.reason, event.remedy)

    def locate(self, row: StepMetrics, origin: NanOrigin) -> None:
        """It was found out where in the model this row's trouble began."""
        told = {"inputs": origin.inputs, "weights": origin.weights}
        for event in self.judge.located(row, origin.module, origin.module_type, **told):
            if self.journal.rank == 0:
                self.journal.event(event)

    def went_back(self, attempt: int, step: int) -> None:
        """The run is again as it was after this attempt."""
        self.step, self._open = step, 0
        self.judge.rewound(attempt, step)

    def note(
        self,
        name: str,
        detail: str = "",
        *,
        at: StepMetrics | None = None,
        values: Mapping[str, Any] | None = None,
        attempt: int = 0,
    ) -> None:
        """Write a note into the journal."""
        step, attempt = (self.step, attempt) if at is None else (at.step, at.attempt)
        rank = self.journal.rank
        self.journal.event(
            Note(step=step, attempt=attempt, rank=rank, name=name, detail=detail, values=dict(values or {}))
        )
