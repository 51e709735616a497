"""Tries decisions out before they are applied: a trial says what helps, and the run continues from that branch."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from surefoot.checkpoint.rng import get_rng_states, set_rng_states
from surefoot.checkpoint.snapshots import Snapshot, SnapshotRing
from surefoot.checkpoint.train_state import TrainState
from surefoot.guard.context import GuardContext
from surefoot.guard.hooks import HasSwitch, switched_off
from surefoot.guard.metrics_reader import MetricsReader
from surefoot.guard.origin_control import make_origins
from surefoot.guard.trial_overrides import lr_fell, overrides_for, overrides_of_restart
from surefoot.judge.diagnosis import diagnosis_by_trial
from surefoot.judge.judge import Judge
from surefoot.judge.thresholds import SETTLED_UPDATES
from surefoot.records import (
    EVENT_MARK,
    Action,
    Cause,
    Decision,
    Diagnosis,
    FindingKind,
    StepMetrics,
    StepOverrides,
    Verdict,
)
from surefoot.trials.branches import BRANCHES, LAST_BRANCHES, Branch, BranchId
from surefoot.trials.conclusion import DATA_CAUSES, Deviation, TrialEvent, TrialResult
from surefoot.trials.kept_steps import NotKept, StepRecorder
from surefoot.trials.rank_agreement import RankAgreement, TrialFailed
from surefoot.trials.restart import RestartRunner, RestartTrial, settings_text
from surefoot.trials.runner import Trial, TrialRunner
from surefoot.trials.sandbox import Sandbox, StepFn

log = logging.getLogger("surefoot")
FIRST_PAUSE = 10
"""Attempts after a trial in which nothing helped, until the next one; twice as many after each further such trial."""
MAX_PAUSE = 160
FIRST_CEILINGS_CHECK = 8
"""Refusals in a row after which it is asked whether the ceilings are too tight; then after twice as many."""
MAX_STOPS_AVERTED = 3
"""How often in a run a trial may decide against a stop."""
PREFERRED = (Cause.LEARNING_RATE, Cause.MOMENTUM, Cause.BAD_BATCH, Cause.WEIGHTS_DAMAGED, Cause.TRANSIENT)
"""Which of several causes that a trial leaves open is named where the judge has named none of them."""

NOT_RUN = (TrialFailed, torch.OutOfMemoryError)
"""Why a trial ends without a result."""
MAX_HOPELESS = 2
"""Trials in which no restart helped a run that has learnt nothing, after which it is stopped."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """A branch of a trial that the run is to continue from."""

    snapshot: Snapshot
    branch: Branch
    retake: Callable[[Callable[[], None]], int]
    """Takes the branch's steps once more after the given rewind, and returns how many updates that were."""


class TrialControl:
    """Runs trials of one attached run and continues from the branch that helps."""

    def __init__(
        self,
        guard: HasSwitch,
        context: GuardContext,
        step_fn: StepFn,
        reader: MetricsReader,
        judge: Judge,
        train_state: TrainState,
        loss_scale: Callable[[], Any],
        agreement: RankAgreement,
        all_ranks_guarded: Callable[[], bool],
    ) -> None:
        self._guard, self._context, self._reader, self._judge = guard, context, reader, judge
        self._train_state = train_state
        self.recorder = StepRecorder(context.optimizers, max_steps=context.policy.snapshot_reach, loader=context.loader)
        self._agreement, self._all_ranks_guarded = agreement, all_ranks_guarded
        sandbox = Sandbox(
            context.model, context.optimizers, step_fn, train_state, loss_scale=loss_scale, agreement=agreement
        )
        own = sandbox if agreement.alone else None
        self.origins = make_origins(guard, context, reader, judge, self.recorder, loss_scale, own)
        self._runner = TrialRunner(sandbox, self.recorder)
        self._restart_runner = RestartRunner(sandbox, self.recorder)
        self.on_harm: Callable[[Decision, Trial | RestartTrial], None] | None = None
        """Called with each trial that found harm, before anything is done about it."""
        self._restart: Decision | None = None
        self._hopeless = 0
        """Complete trials of a run that has learnt nothing in which no restart helped."""
        self._suspicion: Decision | None = None
        self._tried_suspicion: Decision | None = None
        self._tried: TrialEvent | None = None
        """The last trial, to be recorded with what came of it."""
        self._pause, self._paused_until = FIRST_PAUSE, -1
        self._stops_averted = 0
        self._lr_lowered = 0
        """How often a trial showed that nothing but a lower learning rate helps."""
        self._refused = 0
        """Finite updates refused in a row."""
        self._not_applied = 0
        """Updates not applied in a row, for whatever reason."""
        self._check_ceilings_at = FIRST_CEILINGS_CHECK
        self._denied: tuple[Decision, int] | None = None
        """The acceptance of data that teaches nothing so far, and after how many refusals to try it again."""

    def row_read(self, row: StepMetrics) -> None:
        """A row was read and judged."""
        self.recorder.row_read(row)
        self.recorder.trust(self._judge.proven)
        self._suspicion = self._judge.suspicion or self._suspicion
        self._restart = self._judge.restart or self._restart
        self._denied = None if row.applied else self._denied
        self._refused = 0 if row.applied else self._refused + (row.verdict is Verdict.NORM_OUTLIER)
        self._not_applied = 0 if row.applied else self._not_applied + 1

    def _num_refused(self) -> int:
        """Updates refused in a row; on several ranks by the rows, as they may keep different batches."""
        return len(self.recorder.last_refused()) if self._agreement.alone else self._not_applied

    def take_suspicion(self, attempt: int) -> Decision | None:
        """A rewind that is worth a trial, though the judge would not act by its rules alone."""
        if self._denied is not None and self._num_refused() >= self._denied[1]:
            return self._denied[0]
        suspicion, self._suspicion = self._suspicion, None
        self._tried_suspicion = suspicion
        return suspicion if attempt > self._paused_until else None

    def lift_ceilings(self) -> Decision | None:
        """The end of refusing updates by ceilings that healthy batches of earlier times would not pass either."""
        row, overrides = self._reader.latest, self._judge.overrides
        if self._refused < self._check_ceilings_at:
            self._check_ceilings_at = FIRST_CEILINGS_CHECK if self._refused == 0 else self._check_ceilings_at
            return None
        self._check_ceilings_at *= 2
        if row is None or not overrides.has_ceilings:
            return None
        try:
            with self._guard_off():
                too_tight = self._runner.would_refuse(overrides)
        except NOT_RUN:
            return None
        if not too_tight:
            return None
        self._refused = 0
        why = "batches on which the run was healthy would be refused, too"
        decision = self._judge.without_ceilings(row, f"the ceilings are lifted: {why}")
        self._tried = self._event(decision, TrialResult.LEFT_ALONE, why, {})
        return decision

    def take_restart(self) -> Decision | None:
        """A restart that is worth a trial, because the run seems broken since its first update."""
        restart, self._restart = self._restart, None
        return restart

    def consider_restart(self, decision: Decision, ring: SnapshotRing) -> tuple[Decision, Continuation | None] | None:
        """The restart to continue from, or a stop of a run that nothing helps; None to leave the run alone."""
        try:
            trial = self._run_restart(ring)
        except NOT_RUN as why:
            self._tried = self._event(decision, TrialResult.NOT_RUN, str(why), {})
            self.dismissed(decision, proposed=True)
            return None
        best = trial.best
        result = TrialResult.LEFT_ALONE if best is None else TrialResult.CONTINUED
        self._tried = self._event(decision, result, trial.describe(), trial.as_json())
        if best is None:
            self._hopeless += trial.learnt_nothing and trial.complete and not trial.settings_right
            if self._hopeless < MAX_HOPELESS:
                self.dismissed(decision, proposed=True)
                return None
            reason = f"{decision.reason}; from its initial state it learns at no lower learning rate and not clipped"
            stop = replace(decision, action=Action.STOP, reason=reason, remedy="", remedy_id=None, overrides=None)
            self.carried_out(stop, proposed=True)
            return stop, None
        self._hopeless = 0
        before = decision.overrides or StepOverrides()
        lr = 0.0 if self._reader.latest is None else self._reader.latest.lr
        overrides = overrides_of_restart(trial, best, before, lr)
        cause = decision.cause if best.cause is Cause.UNKNOWN else best.cause
        cause = Cause.SCHEDULE if lr_fell(trial, best, before, lr) else cause  # the rate is right by now
        if self._reader.held_causes[:1] != [cause]:
            self._tell(diagnosis_by_trial(decision, cause, trial.describe(), trial.as_json()))
        self._harm_found(decision, trial)
        reason = f"{decision.reason}; {settings_text(best)}"
        decision = replace(decision, cause=cause, overrides=overrides, reason=reason)
        retake = functools.partial(self._restart_runner.retake, trial)
        return decision, Continuation(trial.snapshot, best, retake)

    def _run_restart(self, ring: SnapshotRing) -> RestartTrial:
        with self._guard_off():
            ring.verify()
            initial = self._agreement.common([s for s in ring.snapshots if s.attempt < 0])
            if not initial:
                raise NotKept("the initial state is not kept any more")
            return self._restart_runner.run(initial[0], deadline=self._context.policy.trial_seconds)

    def consider(
        self, decision: Decision, ring: SnapshotRing, row: StepMetrics, attempt: int
    ) -> tuple[Decision, Continuation | None] | None:
        """The decision to apply, and the trial to continue from; None if the run is better left alone."""
        if not _is_tried(decision, row) or (
            decision.action is Action.STOP and self._stops_averted >= MAX_STOPS_AVERTED
        ):
            return decision, None
        self._stops_averted += decision.action is Action.STOP
        try:
            trial = self._run(decision, ring)
        except NOT_RUN as why:
            self._reader.record(self._event(decision, TrialResult.NOT_RUN, str(why), {}))
            return decision, None
        best = trial.conclusion.best
        # Without a rule that calls for action, other data and other settings are the loop's own business.
        only_suspected = decision is self._tried_suspicion and trial.difference.kind is Deviation.NONE
        if not trial.conclusion.harmed or only_suspected:
            self._paused_until, self._pause = attempt + self._pause, min(2 * self._pause, MAX_PAUSE)
            self._tried = self._event(decision, TrialResult.LEFT_ALONE, trial.conclusion.detail, trial.as_json())
            if trial.conclusion.harmed and self._reader.held:
                self._name_cause(decision, trial)
            return self._without_harm(decision)
        self._pause = FIRST_PAUSE
        tried, decision = decision, self._name_cause(decision, trial)
        self._harm_found(tried, trial)
        overrides = self._overrides_for(trial, decision)
        decision = replace(decision, action=Action.REWIND, overrides=overrides)
        result = TrialResult.REWOUND if best is BranchId.REWIND else TrialResult.CONTINUED
        self._tried = self._event(decision, result, trial.conclusion.detail, trial.as_json())
        if best is BranchId.REWIND:
            return decision, None
        return decision, Continuation(trial.snapshot, BRANCHES[best], functools.partial(self._runner.retake, trial))

    def _overrides_for(self, trial: Trial, decision: Decision) -> StepOverrides | None:
        branch, overrides = BRANCHES.get(trial.conclusion.best), decision.overrides
        if trial.conclusion.causes and trial.conclusion.causes <= DATA_CAUSES and overrides is not None:
            overrides = replace(overrides, loss_ceiling=min(overrides.loss_ceiling, trial.loss_ceiling))
        if branch is None or branch.lr_factor == 1.0:
            return overrides_for(trial.conclusion.causes, overrides)
        lasting = 1.0 if overrides is None else overrides.lasting_lr_factor
        self._lr_lowered += 1
        # A learning rate that served a run for long was right for it: it comes back when all is well, but only once.
        if trial.changed or (decision.step >= SETTLED_UPDATES and self._lr_lowered == 1):
            return StepOverrides(lr_factor=branch.lr_factor, lasting_lr_factor=lasting)
        return StepOverrides(lasting_lr_factor=lasting * branch.lr_factor)

    def _without_harm(self, decision: Decision) -> tuple[Decision, Continuation | None] | None:
        """What is left of a decision when nothing is wrong with the run's state: what it overrides from here on.
        Batches that did no harm are no reason to refuse others like them."""
        if decision.action is Action.ACCEPT:
            return (decision, None) if self._can_be_learnt(decision) else None
        if decision.action is Action.STOP or decision is self._tried_suspicion:
            return None
        overrides = None if decision.overrides is None else decision.overrides.without_ceilings()
        return replace(decision, action=Action.CONSTRAIN, reset_optimizer=False, overrides=overrides), None

    def _can_be_learnt(self, decision: Decision) -> bool:
        """Whether the data that was refused so far should be let in; the judge's word counts where no trial can say."""
        learnt: bool | None = None
        with suppress(*NOT_RUN), self._guard_off():
            learnt = self._runner.can_be_learnt()
        self._denied = None if learnt is not False else (decision, 2 * self._num_refused())
        if learnt is False and self._tried is not None:
            detail = "the refused batches teach nothing about each other: they are refused as long as they come"
            self._tried = replace(self._tried, detail=detail)
        return learnt is not False

    def carried_out(self, decision: Decision, *, proposed: bool) -> None:
        """This decision was applied; `proposed` if it came from a suspicion."""
        if decision.action is Action.ACCEPT:
            self._denied = None
            self.recorder.forget_probes()  # of data that is over
        self._judge.carried_out(decision, proposed=proposed)
        self._record({"carried_out": decision.as_json(), "proposed": proposed})

    def dismissed(self, decision: Decision, *, proposed: bool) -> None:
        """This decision was not applied, because the run is better left alone."""
        self._judge.dismissed(decision, proposed=proposed)
        self._record({"dismissed": decision.as_json(), "proposed": proposed})

    def _run(self, decision: Decision, ring: SnapshotRing) -> Trial:
        onset = decision.max_attempt if decision.max_attempt >= 0 else decision.attempt
        seconds = self._context.policy.trial_seconds
        with self._guard_off():
            ring.verify()
            early = self._agreement.common([s for s in ring.snapshots if s.attempt < onset])
            if not early:
                raise NotKept(f"there is no snapshot from before attempt {onset}")
            old_cases, try_float32 = self._reader.old_cases, decision.cause in FLOAT32_CAUSES
            first = None if old_cases is None else old_cases.first_branch
            return self._runner.run(early, onset, deadline=seconds, try_float32=try_float32, first=first)

    def continue_from(self, continuation: Continuation, ring: SnapshotRing) -> int:
        """Put the run into the state at the end of a trial's best branch; returns the updates it holds since the
        snapshot."""
        schedulers = [(s, copy.deepcopy(s.state_dict())) for s in self._context.schedulers]
        scaler = self._train_state.scaler
        scaler_state = None if scaler is None else copy.deepcopy(scaler.state_dict())
        options = [[dict(group) for group in o.param_groups] for o in self._context.optimizers]
        rng_states = get_rng_states(set())
        with self._guard_off():
            count = continuation.retake(lambda: ring.rewind(continuation.snapshot))
        for scheduler, state in schedulers:
            scheduler.load_state_dict(state)
        if scaler is not None and scaler_state:
            scaler.load_state_dict(scaler_state)
        for optimizer, groups in zip(self._context.optimizers, options, strict=True):
            for group, before in zip(optimizer.param_groups, groups, strict=True):
                group.update(before)
        set_rng_states(rng_states)
        return count

    @contextmanager
    def _guard_off(self) -> Iterator[None]:
        """Hooks of the guard do nothing: neither forward passes nor watched losses of a trial are the run's."""
        if not self._all_ranks_guarded():  # the others would wait for it
            raise NotKept("a rank has lost its protection, and trials need all ranks")
        with switched_off(self._guard):
            yield

    def _name_cause(self, decision: Decision, trial: Trial) -> Decision:
        """The decision with a cause that the trial leaves open; of several the one that the rules find likeliest."""
        causes, likely = trial.conclusion.causes, self._reader.held_causes
        # That smaller updates help, too, says less than what the rules have seen.
        open_causes = [c for c in likely if c in causes or BRANCHES.get(trial.conclusion.best) in LAST_BRANCHES]
        if not causes or (decision.cause in causes and likely[:1] == open_causes[:1]):
            return decision
        # An optimizer that has trained damaged weights is damaged, too: weights that were seen to jump were first.
        if causes <= {Cause.OPTIMIZER_STATE} and self._reader.held_rests_on(FindingKind.WEIGHT_JUMP):
            return decision
        cause = next(iter(open_causes or [c for c in PREFERRED if c in causes]), sorted(causes)[0])
        if likely[:1] != [cause]:
            self._tell(diagnosis_by_trial(decision, cause, trial.conclusion.detail, trial.as_json()))
        return replace(decision, cause=cause)

    def _harm_found(self, decision: Decision, trial: Trial | RestartTrial) -> None:
        """A bundle of the incident is written from here on: with its diagnosis."""
        self._reader.release_held()
        if self.on_harm is not None:
            self.on_harm(decision, trial)

    def _tell(self, diagnosis: Diagnosis) -> None:
        """Record a diagnosis by a trial, before those that the rules made at the same step."""
        if self._reader.held:
            self._reader.lead_held(diagnosis)
        else:
            self._reader.record(diagnosis)

    def _event(self, decision: Decision, result: TrialResult, detail: str, values: Mapping[str, Any]) -> TrialEvent:
        where: dict[str, Any] = {"step": decision.step, "attempt": decision.attempt, "time": decision.time}
        return TrialEvent(**where, rank=self._reader.journal.rank, result=result, detail=detail, values=dict(values))

    def _record(self, outcome: Mapping[str, Any]) -> None:
        """Write the last trial to the journal, with what came of it."""
        event, self._tried = self._tried, None
        if event is not None:
            self._reader.record(replace(event, values={**event.values, **outcome}))
            if event.rank == 0:
                level = self._context.verbosity.level_of_detail(logging.INFO)
                log.log(level, "surefoot: step %d: trial: %s", event.step, event.detail, extra={EVENT_MARK: True})


FLOAT32_CAUSES = (Cause.PRECISION_OVERFLOW, Cause.PRECISION_UNDERFLOW)


def _is_tried(decision: Decision, row: StepMetrics) -> bool:
    """Whether the state of the run is in question: not where updates are refused, or only the precision is."""
    if decision.action is Action.REFUSE or decision.action is Action.RELAX or not _state_may_be_bad(decision, row):
        return False
    overrides = decision.overrides or StepOverrides()
    precision_only = decision.action is Action.CONSTRAIN and overrides.float32
    return not precision_only and not decision.loss_scale > 0 and not overrides.rewarmup_steps


def _state_may_be_bad(decision: Decision, row: StepMetrics) -> bool:
    """Not where updates are not finite; nor where refusing them all is a reason to stop."""
    return row.applied or (row.verdict is Verdict.NORM_OUTLIER and decision.action is not Action.STOP)
