"""Holds the overrides in force, applies the judge's decisions, and has trials run about them.

Decisions are applied at the end of the iteration they were made in, when all optimizers have stepped and no gradient is
half accumulated. Snapshots are taken at that same point (`run_snapshots`), so that after a rewind the loop continues
from there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from surefoot.actions.action_context import CannotAct
from surefoot.actions.apply import apply
from surefoot.actions.step_overrides import OverrideApplier
from surefoot.actions.stop import TrainingStopped
from surefoot.checkpoint.buffers import BufferShadow
from surefoot.checkpoint.snapshots import Snapshot, SnapshotRing
from surefoot.checkpoint.train_state import TrainState, reset_optimizer_state
from surefoot.guard.context import GuardContext
from surefoot.guard.hooks import HasSwitch, call_listeners, refuse_all_updates
from surefoot.guard.incident_capture import IncidentCapture
from surefoot.guard.metrics_reader import MetricsReader
from surefoot.guard.origin_control import OriginControl, origins_without_trials
from surefoot.guard.rank_barrier import barrier_of
from surefoot.guard.run_snapshots import RunSnapshots
from surefoot.guard.sample_bans import SampleBans
from surefoot.guard.step_pipeline import StepPipeline
from surefoot.guard.trial_control import Continuation, TrialControl
from surefoot.guard.trial_setup import make_trials
from surefoot.measure.block_layout import VerdictSlot
from surefoot.records import EVENT_MARK, Action, Decision
from surefoot.trials.kept_steps import StepRecorder

log = logging.getLogger("surefoot")
GATE_MEMORY = "surefoot.gates"
"""What snapshots and checkpoints call the memory of the gates."""


class Recovery:
    """Implements `ActionContext`: what actions may reach of a run."""

    def __init__(
        self, context: GuardContext, pipeline: StepPipeline, reader: MetricsReader, *, shadow: BufferShadow | None
    ) -> None:
        self._context = context
        self._policy = context.policy
        self.pipeline = pipeline
        self.overrides = OverrideApplier(context.model, context.optimizers, pipeline.gates)
        self._reader = reader
        self.shadow = shadow
        self._train_state = TrainState(
            context.model,
            context.optimizers,
            scheduler=context.schedulers,
            extra={**context.extra, GATE_MEMORY: self},
            groups=bool(context.schedulers),
        )
        self._train_state.step_changes = {id(gate.optimizer): gate.options for gate in pipeline.gates}
        self.snapshots = RunSnapshots(context, pipeline, reader, self._train_state)
        self._prefilled = [(o, bool(o.state)) for o in self._train_state.optimizers]
        """The optimizers, each with whether it had state before its first step, as Adagrad does."""
        self.decisions: list[Decision] = []
        """Decisions still to be applied."""
        self._rewound_to = -1
        """The attempt after which the state was taken that the run was last rewound to."""
        self._barrier = barrier_of(pipeline.grad_stats.ranks)
        self.trials: TrialControl | None = None
        """Runs trials before a decision is applied; None where that is not possible."""
        self.incidents = IncidentCapture(context, pipeline, reader, self._train_state)
        self.origins: OriginControl | None = None
        """Looks for the origin of refused updates; None without a `step_fn`."""
        self.bans = SampleBans(context, reader, pipeline.grad_stats.ranks, self.all_ranks_guarded)
        self.on_rewind: Callable[[int], None] | None = None
        """Called with the attempt that the run was rewound to."""
        self.rewind_listeners: list[Callable[[int, int], None]] = []
        """The user's, called with the step and the attempt that the run was rewound to."""
        self.stopped = False
        """The run was stopped, and `attach(on_stop=)` told its loop to end."""
        self._refusing: list[RemovableHandle] = []
        self.on_stop: Callable[[], None] | None = None
        """Called before the run is stopped."""

    def enable_trials(self, guard: HasSwitch) -> StepRecorder | None:
        """Run trials from here on, if the run allows them; returns the recorder of its steps."""
        reader = self._reader
        made = make_trials(
            guard, self._context, self.pipeline, reader, self._train_state, self._loss_scale, self.all_ranks_guarded
        )
        if isinstance(made, str):
            if made and reader.journal.rank == 0:
                log.info("surefoot: %s", made)
            if self.pipeline.grad_stats.ranks.world_size > 1:
                self.origins = origins_without_trials(guard, self._context, reader, self._loss_scale)
            reader.traces_nan = self.origins is None
            return None if self.origins is None else self.origins.recorder
        self.trials, self.origins = made, made.origins
        reader.traces_nan = self.origins is None
        self.incidents.recorder = made.recorder
        made.on_harm = self.incidents.trial_ended
        reader.trials_follow = True
        return made.recorder

    def start_bans(self) -> None:
        """The run is resumed, or has begun: from here on banned samples are left out; all ranks must call this."""
        self.bans.start(finds_samples=self.origins is not None)
        if self.origins is not None:
            self.origins.ban = self.bans.ban_culprits

    @property
    def recorder(self) -> StepRecorder | None:
        """Keeps the last steps, for trials or to look for the origin of refused updates; None without `step_fn`."""
        keeper = self.trials or self.origins
        return None if keeper is None else keeper.recorder

    @property
    def ring(self) -> SnapshotRing | None:
        return self.snapshots.ring

    def _loss_scale(self) -> Any:
        return self.pipeline.loss_scale()

    # -- step by step

    def first_forward_began(self) -> None:
        """Before the first forward pass in training, take a snapshot, so that a run can rewind to its very start."""
        if torch.is_grad_enabled():  # after an evaluation a loop may load weights
            self.snapshots.take_initial()

    def before_step(self, k: int) -> None:
        """Optimizer `k` is about to step."""
        self.snapshots.before_update()
        if self.overrides.in_force:
            self.overrides.before_step(k)

    def row_read(self, decisions: Sequence[Decision]) -> None:
        """A row was read and judged; a stop is applied at once."""
        self.snapshots.row_read()
        if self.trials is not None and self._reader.latest is not None:
            self.trials.row_read(self._reader.latest)
        row = self._reader.latest
        if self.origins is not None and row is not None and (self.origins.looked_for or not row.applied):
            self.origins.row_read(row)
        if not decisions:
            return
        for decision in decisions:
            if decision.action is Action.REFUSE:
                self.incidents.refused(decision, self.ring)
        self.decisions += decisions
        if any(d.action is Action.STOP for d in decisions):
            self._reader.journal.flush()
            self._apply_decisions()

    def step_ended(self) -> None:
        """An optimizer has stepped, and others will before the iteration is over.

        Overrides can be set now. A rewind has to wait: the graph of the generator's loss may depend on the weights as
        they are, and a loop that continues in the middle of an iteration would not repeat the whole of it.
        """
        if not any(d.action is Action.REWIND for d in self.decisions):
            self._apply_decisions()

    def iteration_ended(self) -> None:
        """All optimizers have stepped: apply decisions, and take a snapshot if one is due and no incident is open."""
        if self.stopped:
            return
        if self.origins is not None and self.origins.pending and not self._within_iteration:
            self.origins.locate_pending(self.ring)
        if self.incidents.writer.task is not None:
            self.incidents.writer.poll()
        trials = self.trials if self._barrier is None or self.pipeline.stepped else None  # as in `_within_iteration`
        if trials is not None:
            self._try_restart(trials)
            self._lift_ceilings(trials)
        ring = self.snapshots.ring
        if self.decisions or (ring is not None and ring.messages):
            self._apply_decisions()
        if trials is not None:
            self._try_suspicion(trials)
        if self._reader.held:
            self._reader.release_held()
        self.snapshots.take_if_due()

    def pipeline_replaced(self, pipeline: StepPipeline) -> None:
        """The optimizers hold other parameters now."""
        for old, gate in zip(self.pipeline.gates, pipeline.gates, strict=True):
            gate.options = old.options
        pipeline.proposals = self.pipeline.proposals
        self.pipeline = self.snapshots.pipeline = pipeline
        self.overrides.replace_gates(pipeline.gates)

    def release(self) -> None:
        """Lift all overrides and free the snapshots."""
        self.snapshots.report_messages()
        self._reader.release_held()
        self.incidents.writer.poll(wait=True)
        self.bans.release()
        self.overrides.release()
        for handle in self._refusing:
            handle.remove()
        self.snapshots.ring = None

    def state_dict(self) -> dict[str, Any]:
        """The memory of the gates, which is rewound and saved with the run."""
        return {str(k): gate.memory.state_dict() for k, gate in enumerate(self.pipeline.gates)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for k, gate in enumerate(self.pipeline.gates):
            gate.memory.load_state_dict(state[str(k)])

    # -- decisions

    def _apply_decisions(self) -> None:
        decisions, self.decisions = self.decisions, []
        if self.stopped:
            return
        self.snapshots.report_messages()
        for decision in decisions:
            self.incidents.decided(decision)
            try:
                result = self._try_and_apply(decision)
            except TrainingStopped as reason:
                self._stop(reason)
                return
            except CannotAct as why:
                self._reader.judge.failed(decision, str(why))
                self._reader.note("failed", f"{decision.action}: {why}", attempt=self.pipeline.attempt)
                self._log_decision(
                    logging.WARNING, decision, f"{decision.remedy or decision.action} cannot be done: {why}"
                )
            else:
                level = logging.INFO if decision.action is Action.RELAX else logging.WARNING
                self._log_decision(level, decision, result)

    def _stop(self, reason: TrainingStopped) -> None:
        """Raise the reason, or tell the loop to end and refuse all updates until it does."""
        self._reader.release_held()
        if self.on_stop is not None:
            self.on_stop()
        if self._context.on_stop is None:
            raise reason
        self.stopped = True
        self._refusing = refuse_all_updates(self._context.optimizers)
        log.error("%s", reason, extra={EVENT_MARK: True})
        try:
            self._context.on_stop(reason)
        except Exception as error:
            log.error("surefoot: on_stop= failed: %s", error, exc_info=error)

    def _try_and_apply(self, decision: Decision) -> str:
        """Apply a decision, or what a trial finds to be better; returns what was done, in words."""
        latest = self._reader.latest
        if self.trials is None or self.ring is None or latest is None or self._within_iteration:
            return apply(decision, self)
        tried = self.trials.consider(decision, self.ring, latest, self.pipeline.attempt)
        if tried is None:
            self.trials.dismissed(decision, proposed=False)
            return "left alone: no trial ended better than the run as it is"
        return self._carry_out(*tried)

    @property
    def _within_iteration(self) -> bool:
        """Whether other ranks may be in collectives of the loop, such as those of a backward pass."""
        return self._barrier is not None and not self.pipeline.stepped

    def _try_restart(self, trials: TrialControl) -> None:
        """Run a trial of restarts if the run seems broken since its first update."""
        restart = trials.take_restart()
        if restart is None or self.ring is None:
            return
        tried = trials.consider_restart(restart, self.ring)
        if tried is None:
            return
        decision, continuation = tried
        self._reader.record(decision)
        self.decisions = []  # about the run that is over
        if continuation is None:
            try:
                apply(decision, self)  # a stop
            except TrainingStopped as reason:
                self._stop(reason)
            return
        result = self._continue_from(continuation, self.ring)
        trials.carried_out(decision, proposed=True)
        if decision.overrides is not None:
            self.overrides.set(decision.overrides)
        self._log_decision(logging.WARNING, decision, f"{decision.remedy}; {result}")

    def _lift_ceilings(self, trials: TrialControl) -> None:
        """Lift ceilings that refuse updates because of the state of the run, not because of the data."""
        decision = trials.lift_ceilings()
        if decision is None or decision.overrides is None:
            return
        self._reader.record(decision)
        self.overrides.set(decision.overrides)
        trials.carried_out(decision, proposed=True)
        self._log_decision(logging.WARNING, decision, "")

    def _carry_out(self, decision: Decision, continuation: Continuation | None, *, proposed: bool = False) -> str:
        """Apply a decision that a trial has led to, if there was one."""
        assert self.ring is not None
        assert self.trials is not None
        if continuation is None:
            result = apply(decision, self)
            if decision.action is Action.REWIND:
                self.trials.recorder.forget_after(self._rewound_to)
        else:
            result = self._continue_from(continuation, self.ring)
            if decision.overrides is not None:
                self.overrides.set(decision.overrides, decision.optimizers)
        self.trials.carried_out(decision, proposed=proposed)
        return result

    def _try_suspicion(self, trials: TrialControl) -> None:
        """Run a trial about an incident that was just diagnosed, if any."""
        suspicion = trials.take_suspicion(self.pipeline.attempt)
        if suspicion is None or self.ring is None or self._reader.latest is None:
            return
        tried = trials.consider(suspicion, self.ring, self._reader.latest, self.pipeline.attempt)
        if tried is None or (tried[0] is suspicion and suspicion.action is not Action.ACCEPT):
            trials.dismissed(suspicion, proposed=True)
            return
        self._reader.record(tried[0])
        self._carry_out(*tried, proposed=True)

    def _continue_from(self, continuation: Continuation, ring: SnapshotRing) -> str:
        """Put the run into the state that a trial's best branch ends in."""
        assert self.trials is not None
        state = continuation.snapshot
        step = state.step
        updates = self.trials.continue_from(continuation, ring)
        state.step += updates  # for everything that follows the run
        branch = continuation.branch
        detail = f"trained the {updates} updates since step {step} again, {branch.text}"
        self._after_rewind(state, detail, kept=updates, branch=branch.id.value)
        state.step = step
        return detail

    def _log_decision(self, level: int, decision: Decision, result: str) -> None:
        if self._reader.journal.rank == 0 and decision.action is not Action.REFUSE:
            values = decision.step, decision.reason, result or decision.action
            level = self._context.verbosity.level_of_detail(level)
            log.log(level, "surefoot: step %d: %s; %s", *values, extra={EVENT_MARK: True})

    # -- ActionContext

    @property
    def scaler(self) -> Any:
        return self.pipeline.scaler

    def common_attempts(self, attempts: Sequence[int]) -> Sequence[int]:
        if not self.all_ranks_guarded():  # it would not answer
            raise CannotAct("a rank has lost its protection, so the ranks cannot be rewound together")
        return self.pipeline.grad_stats.ranks.intersect(attempts, self._policy.max_snapshots)

    def all_ranks_guarded(self) -> bool:
        """Whether every rank still has its protection, and so takes part in what all do together."""
        if self._barrier is None:
            return True
        stats = self.pipeline.grad_stats
        # Rows are read two steps late, and a rank may have gone since. Reading `newest` waits for the device, which is
        # fine: this is called for rewinds and trials only.
        newest = float(stats.block.verdict[VerdictSlot.ACTIVE_RANKS])
        return min(self._reader.ranks_alive, newest) >= stats.ranks.world_size and self._barrier.wait()

    def rewound(self, state: Snapshot) -> None:
        self._after_rewind(state, f"back to step {state.step}, as after attempt {state.attempt}")

    def _after_rewind(self, state: Snapshot, detail: str, **values: Any) -> None:
        """The run is in this state now, whose step says how many updates it holds."""
        attempt, self._rewound_to = self.pipeline.attempt, state.attempt
        self._reader.drain(self.pipeline, judge=False)  # rows of updates that are undone now: written, not judged
        if self.shadow is not None:
            self.shadow.reset()
        self.pipeline.reset_after_rewind()
        self.snapshots.last_attempt = self.pipeline.attempt
        lost = max(0, self._reader.step - state.step)
        self._reader.rewound(state.attempt, state.step)
        if self.on_rewind is not None:
            self.on_rewind(state.attempt)
        self._reader.note(
            "rewound",
            detail,
            values={"step": state.step, "attempt": state.attempt, "lost": lost, **values},
            attempt=attempt,
        )
        self.snapshots.report_messages()
        call_listeners(self.rewind_listeners, state.step, state.attempt)

    def reset_optimizers(self) -> None:
        for optimizer, prefilled in self._prefilled:
            reset_optimizer_state(optimizer, prefilled=prefilled)
        for gate in self.pipeline.gates:
            gate.optimizer_state_replaced()
