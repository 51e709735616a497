"""Captures incidents of an attached run: what its bundles hold, and when one is written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from surefoot.checkpoint.snapshots import SnapshotRing
from surefoot.checkpoint.train_state import TrainState
from surefoot.guard.context import GuardContext
from surefoot.guard.metrics_reader import MetricsReader
from surefoot.guard.step_pipeline import StepPipeline
from surefoot.incidents.bundle_writer import BundleWriter, Moment
from surefoot.incidents.kept_data import KeptData
from surefoot.records import Action, Decision
from surefoot.trials.kept_steps import NotKept, StepRecorder
from surefoot.trials.restart import RestartTrial
from surefoot.trials.runner import Trial

REFUSALS_APART = 100
"""Attempts that must lie between two refusals for the later one to be an incident of its own."""
RESTART = "restart"


class IncidentCapture:
    """Decides which moments of a run become incident bundles."""

    def __init__(
        self, context: GuardContext, pipeline: StepPipeline, reader: MetricsReader, train_state: TrainState
    ) -> None:
        self._context, self._pipeline, self._reader, self._train_state = context, pipeline, reader, train_state
        self.recorder: StepRecorder | None = None
        """The steps that are kept for trials, where there are trials."""
        self._last_refusal = -REFUSALS_APART
        self.writer = BundleWriter(
            reader.journal.run_dir, context.model, context.optimizers, flush=reader.journal.flush, report=self._report
        )

    def trial_ended(self, decision: Decision, trial: Trial | RestartTrial) -> None:
        """A trial found harm; the run is as it was before the trial."""
        restart = isinstance(trial, RestartTrial)
        recorder = self.recorder
        if recorder is None or self._reader.journal.rank > 0:
            return
        moment = self._moment(
            decision,
            kind=RESTART if restart else decision.action.value,
            onset=0 if restart else trial.onset,
            snapshot=trial.snapshot.attempt,
            trial=trial.as_json(),
        )
        if not moment.data_missing:
            moment.before, moment.now = trial.snapshot.copy, self._train_state.capture()
            moment.data = KeptData([*recorder], recorder.probes(trial.snapshot.attempt + 1))
        self.writer.capture(moment)

    def refused(self, decision: Decision, ring: SnapshotRing | None) -> None:
        """An update was refused; of refusals that follow one another, the first is an incident."""
        apart = decision.attempt - self._last_refusal >= REFUSALS_APART
        self._last_refusal = decision.attempt
        if not apart or self._reader.journal.rank > 0:
            return
        snapshots = [] if ring is None else [s for s in ring.snapshots if s.attempt < decision.attempt]
        snapshot = snapshots[-1] if snapshots else None
        moment = self._moment(
            decision,
            kind=Action.REFUSE.value,
            onset=decision.attempt,
            snapshot=decision.attempt - 1 if snapshot is None else snapshot.attempt,
        )
        if snapshot is None:
            moment.data_missing = moment.data_missing or "no snapshot from before this update was kept"
        elif not moment.data_missing and self.recorder is not None:
            moment.before = snapshot.copy
            try:
                steps = [s for s in self.recorder.since(snapshot.attempt + 1) if s.attempt <= decision.attempt]
                moment.data = KeptData(steps)
            except NotKept as why:
                moment.data_missing = str(why)
        self.writer.capture(moment)

    def decided(self, decision: Decision) -> None:
        """A rewind or a stop is applied by the rules alone."""
        if self.recorder is None and decision.action in (Action.REWIND, Action.STOP) and not self._reader.journal.rank:
            onset = decision.max_attempt if decision.max_attempt >= 0 else decision.attempt
            kind = decision.action.value
            self.writer.capture(self._moment(decision, kind=kind, onset=onset, snapshot=onset - 1))

    def _moment(
        self,
        decision: Decision,
        *,
        kind: str,
        onset: int,
        snapshot: int,
        trial: Mapping[str, Any] | None = None,
    ) -> Moment:
        step_fn, scale = self._context.step_fn, self._pipeline.loss_scale()
        info = {
            "reason": decision.reason,
            "decision": decision.as_json(),
            "trial": trial,
            "step_fn": "" if step_fn is None else f"{step_fn.__module__}:{getattr(step_fn, '__qualname__', step_fn)}",
            "loss_scale": None if scale is None else float(scale),
            "threads": torch.get_num_threads(),
        }
        return Moment(
            kind=kind,
            step=decision.step,
            attempt=decision.attempt,
            onset=onset,
            snapshot=snapshot,
            info=info,
            data_missing=self._data_missing(),
        )

    def _data_missing(self) -> str:
        """Why no incident of this run has states and batches; empty if they have."""
        if not self._context.incident_data:
            return "the run was attached with incident_data=False"
        if self._pipeline.grad_stats.ranks.world_size > 1:
            return "the run has several processes, whose states and batches are not bundled"
        if self.recorder is None:
            return "no step_fn was given, so no batches were kept"
        return ""

    def _report(self, message: str, values: Mapping[str, Any]) -> None:
        self._reader.note("incident", message, values=values, attempt=self._pipeline.attempt)
