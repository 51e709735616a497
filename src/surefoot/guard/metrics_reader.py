"""Reads the numbers of a step on the host: makes a row, writes it to the journal, has it judged, logs events."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from surefoot.checkpoint.buffers import EXEMPT_AFTER
from surefoot.guard.iteration_order import IterationOrder
from surefoot.guard.old_cases import OldCases
from surefoot.guard.step_metrics import StepContext, bad_buffers, step_metrics_from, worst_tensors
from surefoot.guard.step_pipeline import StepPipeline
from surefoot.journal.writer import Journal
from surefoot.judge.history import History
from surefoot.judge.judge import Judge
from surefoot.judge.multi_optimizer import AnyJudge
from surefoot.judge.policy import Policy
from surefoot.measure.block_layout import HostBlock, SharedSlot, SummarySlot, VerdictSlot
from surefoot.measure.layout import ParamLayout
from surefoot.measure.nan_tracer import NanOrigin
from surefoot.measure.resources import StepTimer
from surefoot.records import (
    EVENT_MARK,
    NAN,
    Action,
    Cause,
    CheckpointEvent,
    Decision,
    Diagnosis,
    Event,
    FindingKind,
    Note,
    Outcome,
    StepMetrics,
    Verdict,
)
from surefoot.story.incident_log import IncidentLog
from surefoot.story.verbosity import Verbosity

log = logging.getLogger("surefoot")
_GOOD_NEWS = ("saved", "resumed", "proved", "exact_if")
"""Checkpoint events that are logged as info, and by rank 0 only."""


class MetricsReader:
    """Reads each block exactly once, in order; the only place that counts the steps of the run."""

    def __init__(
        self,
        journal: Journal,
        judge: AnyJudge,
        *,
        policy: Policy,
        timer: StepTimer,
        order: IterationOrder | None = None,
        steps_of: int | None = None,
        verbosity: Verbosity = Verbosity.NORMAL,
    ) -> None:
        self.journal = journal
        self.judge = judge
        self.order = order or IterationOrder(1)
        self.history = History()
        self.step = 0
        self.total_steps = NAN
        """Steps the whole run will have, if the user has reported it."""
        self.latest: StepMetrics | None = None
        self.last_attempt = -1
        """The attempt that was read last."""
        self.complete_attempt = -1
        """The last attempt with every row read: each optimizer that steps on the same backward adds one."""
        self.ranks_alive = math.inf
        """The smallest number of ranks seen to measure; fewer than the world once one has lost its protection."""
        self.snapshot_interval = self.snapshot_room = NAN
        """What the ranks agreed on in the attempt read last, see `SharedSlot`; NaN where nothing, or on one rank."""
        self.trials_follow = False
        """Trials are run: a diagnosis that one will follow is held back until it has told which causes it rules out."""
        self.held: list[Event] = []
        """Events that wait for a trial: a diagnosis, and all that came after it."""
        self.traces_nan = True
        """A NaN in the loss is traced through the next forward passes; not needed where its step is run again."""
        self.old_cases: OldCases | None = None
        """Incidents of earlier runs, where `attach` was given some."""
        self.save_running = False
        """Whether any rank was writing a checkpoint at the last attempt read."""
        self._observes = policy.observe
        self._verbosity = verbosity
        self._incident_log = IncidentLog(str(journal.run_dir), verbosity)
        if journal.rank == 0:
            journal.listeners.append(self._incident_log.on_event)
        self._timer = timer
        self._steps_of = steps_of
        """The optimizer whose applied updates are the steps; None where a step is an iteration of the loop."""
        self._iterations = 0
        """Iterations that had ended when the last row was sent."""
        self._uncounted_updates = 0
        """Applied updates since the last iteration that was counted."""
        self._stops = 0
        """Stop decisions since the last applied update."""

    def read(self, block: HostBlock, context: StepContext, *, judge: bool = True) -> list[Decision]:
        """Read the numbers of one attempted update; returns what the judge decided to do."""
        self._count_iterations(context.iterations_before)
        row = step_metrics_from(
            block,
            context,
            step=self.step,
            history=self.history.of(context.optimizer),
            run=self.history,
            repeated=context.attempt == self.last_attempt,
            seconds_left=NAN if math.isnan(self.total_steps) else self._timer.seconds_for(self.total_steps - self.step),
        )
        self.last_attempt, self.latest = context.attempt, row
        self.complete_attempt = context.attempt if context.ends_iteration else context.attempt - 1
        layers = block.stats
        self.ranks_alive = min(self.ranks_alive, block.verdict[VerdictSlot.ACTIVE_RANKS])
        self.save_running = block.summary[SummarySlot.RANKS_SAVING] != 0
        self.journal.row(row, layers)
        if row.verdict is Verdict.APPLIED or (self._observes and row.verdict < Verdict.OVERFLOW):
            self._uncounted_updates += 1
            self.step += context.optimizer == self._steps_of
            self._stops = 0
        self._count_iterations(context.iterations_before + context.ends_iteration)
        # Where gradients differ between ranks after backward, so do the per-layer numbers: no rank may act on them.
        synced = True
        if len(block.rank_losses) > 1:
            synced = not block.shared[SharedSlot.GRADS_DIFFER] > 0
            self.snapshot_interval = float(block.shared[SharedSlot.SNAPSHOT_INTERVAL])
            self.snapshot_room = float(block.shared[SharedSlot.SNAPSHOT_ROOM])
        events = self.judge.update(row, layers if synced else None) if judge else []
        if not events:
            if self._incident_log.waiting:
                self._incident_log.row_read(row)
            return []
        if self.old_cases is not None:
            events = self.old_cases.annotate(events)
        if self.journal.rank == 0:  # all ranks judge alike, one records it
            hold = self.trials_follow and _is_tried_next(events, self.judge)
            for event in self._without_repeated_stops(events):
                if hold and isinstance(event, Diagnosis):
                    self.held.append(event)
                else:
                    self._write(event)
                self._log_event(event, row, block)
            self._incident_log.row_read(row)
        return [e for e in events if isinstance(e, Decision) and e.applied]

    def drain(self, pipeline: StepPipeline, *, judge: bool = True) -> list[Decision]:
        """Wait for all blocks that are still under way and read them."""
        blocks = pipeline.arrived_blocks(drain=True)
        return [decision for block, context in blocks for decision in self.read(block, context, judge=judge)]

    def follow_up(self, pipeline: StepPipeline) -> None:
        """After a row was read: measure weights and trace a NaN if the judge needs it, report exempted buffers."""
        row = self.latest
        pipeline.check_weights = self.judge.wants_weight_check
        if self.traces_nan and row is not None and row.verdict is Verdict.NONFINITE and not math.isfinite(row.loss):
            origin = pipeline.nan_tracer.trace(row.attempt)
            if origin is None:
                pipeline.nan_tracer.arm()
            else:
                self._locate(row, origin)
        for name in () if pipeline.buffer_check is None else pipeline.buffer_check.take_exempted():
            message = (
                f"buffer {name} became non-finite in {EXEMPT_AFTER} updates in a row while loss and gradients were "
                "finite: this is taken as intended, and the buffer is no longer checked"
            )
            if self.journal.rank == 0:
                log.warning("surefoot: %s", message)
            self.note("buffers", message, attempt=pipeline.attempt)

    def _locate(self, row: StepMetrics, origin: NanOrigin) -> None:
        """The tracer found the module in which this row's NaN started."""
        found_in = {"inputs": origin.inputs, "weights": origin.weights}
        for event in self.judge.located(row, origin.module, origin.module_type, **found_in):
            if self.journal.rank == 0:
                self.journal.event(event)

    # -- counting steps

    def _count_iterations(self, iterations: int) -> None:
        """An iteration counts as a step if at least one of its updates was applied."""
        if iterations <= self._iterations:
            return
        if self._steps_of is None:
            self.step += min(iterations - self._iterations, self._uncounted_updates)
        self._iterations, self._uncounted_updates = iterations, 0

    def finish_iteration(self) -> None:
        """The loop is over: count the updates since the last known end of an iteration as one iteration; where only
        one optimizer has stepped at all, as one iteration each."""
        self._count_iterations(self._iterations + (1 if self.order.several else self._uncounted_updates))

    def rewired(self, layout: ParamLayout) -> None:
        """The optimizers hold other tensors now."""
        self.journal.layout(layout.names, layout.numels)
        self.judge.rewired(layout.names, [(span.start, span.stop) for span in layout.optimizer_spans])

    def rewound(self, attempt: int, step: int) -> None:
        """The run is again as it was after this attempt."""
        self.step, self._uncounted_updates = step, 0
        self.judge.rewound(attempt, step)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of the guard: judge, last 100 losses and norms, order of the optimizers."""
        return {
            "judge": self.judge.state_dict(),
            "history": self.history.state_dict(),
            "order": self.order.state_dict(),
        }

    # -- events

    @property
    def held_causes(self) -> list[Cause]:
        """The causes in the diagnoses that are held back, the likeliest first."""
        return [event.cause for event in self.held if isinstance(event, Diagnosis)]

    def held_rests_on(self, detector: FindingKind) -> bool:
        """Whether a diagnosis that is held back has a finding of this detector among its evidence."""
        diagnoses = (event for event in self.held if isinstance(event, Diagnosis))
        return any(detector in event.evidence.get("findings", ()) for event in diagnoses)

    def lead_held(self, diagnosis: Diagnosis) -> None:
        """Put this diagnosis, by a trial, before those that are held back."""
        self.held.insert(0, diagnosis)

    def release_held(self) -> None:
        """Write what was held back."""
        held, self.held = self.held, []
        for event in held:
            self.journal.event(event)

    def record(self, event: Event) -> None:
        """Write an event of something that all ranks do alike: one of them records it."""
        if self.journal.rank == 0:
            self._write(event)

    def _write(self, event: Event) -> None:
        """Write an event, or hold it back behind those that wait for a trial."""
        if self.held:
            self.held.append(event)
        else:
            self.journal.event(event)

    def _without_repeated_stops(self, events: list[Event]) -> list[Event]:
        """A loop that ignores a stop is stopped at every step; only the 1st, 2nd, 4th, 8th ... time is recorded."""
        if not any(isinstance(e, Decision) and e.action is Action.STOP for e in events):
            return events
        self._stops += 1
        repeated = self._stops & (self._stops - 1)
        return [e for e in events if not (repeated and isinstance(e, Decision) and e.action is Action.STOP)]

    def _log_event(self, event: Event, row: StepMetrics, block: HostBlock) -> None:
        if isinstance(event, Outcome):
            level = self._verbosity.level_of_detail(logging.INFO)
            values = event.step, event.action, event.detail
            log.log(level, "surefoot: step %d: %s: %s", *values, extra={EVENT_MARK: True})
        elif isinstance(event, Decision) and event.action is Action.REFUSE:
            result = "refused" if event.applied else "would have been refused"
            values = row.step, row.attempt, result, event.reason
            level = self._verbosity.level_of_detail(logging.WARNING)
            log.log(level, "surefoot: update %d (attempt %d) %s: %s", *values, extra={EVENT_MARK: True})
            worst = worst_tensors(self.judge.names, block.stats, row)
            if worst or not row.nonfinite_buffers > 0:
                self.note("tensors", "tensors with the most unusual gradients", row=row, values={"tensors": worst})
            if row.nonfinite_buffers > 0:
                bad = bad_buffers(self.judge.buffers, block.buffer_nonfinite)
                self.note("buffers", "buffers that the batch made non-finite", row=row, values={"buffers": bad})
        elif isinstance(event, Decision) and not event.applied:
            level = self._verbosity.level_of_detail(logging.INFO)
            log.log(level, "surefoot: step %d: %s; would have been done: %s", event.step, event.reason, event.remedy)

    def note(
        self,
        name: str,
        detail: str = "",
        *,
        row: StepMetrics | None = None,
        values: Mapping[str, Any] | None = None,
        attempt: int = 0,
    ) -> None:
        """Write a note to the journal, at the step and attempt of `row` if given."""
        step, attempt = (self.step, attempt) if row is None else (row.step, row.attempt)
        rank = self.journal.rank
        self._write(Note(step=step, attempt=attempt, rank=rank, name=name, detail=detail, values=dict(values or {})))


def _is_tried_next(events: list[Event], judge: AnyJudge) -> bool:
    """Whether trials are about to be run of what was diagnosed: not where the run is stopped at once."""
    decisions = [event for event in events if isinstance(event, Decision) and event.action is not Action.REFUSE]
    proposed = isinstance(judge, Judge) and (judge.suspicion is not None or judge.restart is not None)
    return all(d.action is not Action.STOP for d in decisions) and (proposed or bool(decisions))


class CheckpointEventLog:
    """Writes checkpoint events to the journal and to the log."""

    def __init__(self, reader: MetricsReader, pipeline: StepPipeline) -> None:
        self._reader = reader
        self.pipeline = pipeline

    def record(self, name: str, message: str, values: Mapping[str, Any] | None = None) -> None:
        rank = self._reader.journal.rank
        event = CheckpointEvent(
            step=self._reader.step,
            attempt=self.pipeline.attempt,
            rank=rank,
            name=name,
            detail=message,
            values=dict(values or {}),
        )
        self._reader.journal.event(event)
        if rank == 0 or name not in _GOOD_NEWS:
            level = logging.INFO if name in _GOOD_NEWS else logging.WARNING
            log.log(level, "surefoot: %s", message, extra={EVENT_MARK: True})
