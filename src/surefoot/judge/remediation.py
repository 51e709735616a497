"""From a diagnosed incident to a decision: which remedy is next, within the policy's limits, and whether it helped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from surefoot.journal.aliases import OVERRIDES, renamed
from surefoot.judge.evidence import LrDropped, RegressionEvidence, ReplicasEvidence, ScaleFell
from surefoot.judge.harm import raised_without_harm, rescaled_at_onset
from surefoot.judge.incident import Incident, lower_caps
from surefoot.judge.policy import Policy
from surefoot.judge.remedies import (
    CAP_REMEDIES,
    DEFAULT_REMEDIES,
    EARLY_REMEDIES,
    EVAL_HARM_REMEDIES,
    LOW_SCALE_REMEDIES,
    REMEDIES_BY_CAUSE,
    REPLICA_REMEDIES,
    RESTART,
    REWIND,
    STALE_GRADS_REMEDIES,
    Remedy,
    load_last,
    load_remedies,
)
from surefoot.judge.signals import NO_OVERRIDES, Signals
from surefoot.judge.thresholds import CLEAR_RATIO, HUGE_RATIO, REPEAT_COUNT, TRIPLE_RATIO, WINDOW_ROWS
from surefoot.records import (
    Action,
    Cause,
    Decision,
    Event,
    FindingKind,
    Outcome,
    RemedyId,
    StepMetrics,
    StepOverrides,
    Verdict,
)


class Remediation:
    """Keeps track of the remedies tried, failures in a row, the overrides in force, and when to relax them."""

    def __init__(self, policy: Policy, signals: Signals) -> None:
        self._policy = policy
        self._signals = signals
        self.overrides = self._previous_overrides = NO_OVERRIDES
        self.failures = 0
        """Actions in a row that did not help."""
        self.actions = 0
        self._tried: list[RemedyId] = []
        """Remedies that did not help, since one did or there was progress."""
        self._impossible: list[RemedyId] = []
        """Remedies that could not be applied, since one helped."""
        self._updates_since = -1
        """Applied updates since the last action; -1 when its outcome is known."""
        self._healthy_updates = 0
        """Healthy updates since overrides were last set or relaxed."""
        self._relax_after = policy.relax_after
        self._relaxed = False
        """Overrides were relaxed, and it is not known yet whether that was too early."""
        self._refusals = 0
        """Updates refused since overrides were last set or relaxed."""
        self._waiting_out = False
        """The ceilings in force are there to wait until harmful data is over."""
        self.active = False
        """An outcome is awaited, overrides are in force, or what was tried is remembered."""
        self._last: tuple[Action, RemedyId | None] | None = None
        """Action and remedy of the last decision that applied one; older checkpoints do not say which remedy."""
        self._loss_before = math.nan
        """The usual loss at that decision."""

    @property
    def outcome_pending(self) -> bool:
        return self._updates_since >= 0

    def update(self, row: StepMetrics, *, trouble: bool) -> list[Event]:
        """A row that calls for no action: report whether the last action helped, and relax overrides in time."""
        if row.optimizer or not row.applied:
            return []
        self._healthy_updates = 0 if trouble else self._healthy_updates + 1
        if self._relaxed and self._healthy_updates >= self._relax_after:
            self._relaxed, self._relax_after = False, self._policy.relax_after
        events: list[Event] = []
        if self.outcome_pending:
            self._updates_since += 1
            if self._updates_since >= self._policy.healthy_steps_to_confirm and not trouble:
                helped = not self._loss_still_high()
                events.append(self._outcome(row, helped=helped))
                if helped:
                    self.failures, self._tried, self._impossible = 0, [], []
                else:  # no further action now, but the next incident gets another remedy
                    self._tried += self._last_remedy
                self._updates_since = -1
        if self._healthy_updates >= self._policy.relax_after and not self.outcome_pending:
            self.failures, self._tried = 0, []  # that is progress, whatever helped
        events += self._relax(row)
        remembers = self.outcome_pending or self._relaxed or self.failures or self._tried
        self.active = bool(remembers) or self.overrides.temporary
        return events

    def _relax(self, row: StepMetrics) -> list[Event]:
        wait = self._relax_after // 4 if self.overrides.lr_factor < 1 else self._relax_after
        if not self.overrides.temporary or self._healthy_updates < wait or self.outcome_pending:
            return []
        relaxed = self._relaxed_overrides(row)
        reason = f"{self._healthy_updates} healthy updates: overrides are relaxed"
        self._healthy_updates = self._refusals = 0
        self._relaxed = True
        if relaxed == self.overrides:
            return []
        self.overrides = relaxed
        return [self.decision(row, Action.RELAX, reason, overrides=relaxed)]

    def _loss_still_high(self) -> bool:
        """The recent losses are still above what they were before the incident."""
        recent = sorted(self._signals.recent_losses)
        return bool(recent) and self._signals.sigmas(recent[len(recent) // 2]) > self._signals.level_sigmas

    def is_waiting_out(self, row: StepMetrics) -> bool:
        """This update was refused on purpose, to wait until harmful data is over."""
        return self._waiting_out and row.verdict is Verdict.NORM_OUTLIER and self.overrides.norm_ceiling != ()

    def count_refusal(self) -> None:
        """A finite update was refused, perhaps by a ceiling in force."""
        self._refusals += 1

    def _relaxed_overrides(self, row: StepMetrics) -> StepOverrides:
        """Drop overrides that were not needed recently, and widen those still needed step by step."""
        current = self.overrides
        lr = row.lr * current.lasting_lr_factor if row.lr > 0 else 0.0
        max_lr = current.max_lr
        if max_lr and lr > self._signals.thresholds.lr_jump_ratio * max_lr[0]:
            pass  # the loop still sets the lr that did the harm
        elif max_lr and lr > max_lr[0]:
            max_lr = tuple(CLEAR_RATIO * cap for cap in max_lr)
        elif max_lr:
            max_lr = ()
        max_momentum = current.max_momentum if current.max_momentum and row.momentum > current.max_momentum[0] else ()
        clip = tuple(CLEAR_RATIO * c for c in current.clip) if current.clip and row.norm > current.clip[0] / 2 else ()
        if current.lr_factor < 1:  # one thing at a time: first raise the lowered lr
            return replace(current, lr_factor=min(1.0, 2 * current.lr_factor), rewarmup_steps=0)
        return replace(
            current,
            rewarmup_steps=0,
            max_lr=max_lr,
            max_momentum=max_momentum,
            clip=clip,
            norm_ceiling=current.norm_ceiling if self._refusals else (),
            loss_ceiling=current.loss_ceiling if self._refusals else math.inf,
            float32=False,
            zero_stale_grads=current.zero_stale_grads and row.stale_grads > 0,
        )

    def accept(self, row: StepMetrics, refused: int) -> list[Event]:
        """Lift the ceilings for a finite change that a rewind did not end: on other batches too it is normal now."""
        if not self.overrides.has_ceilings or refused < 2 * REPEAT_COUNT or row.verdict is not Verdict.NORM_OUTLIER:
            return []
        self._previous_overrides = self.overrides
        self.overrides = self.overrides.without_ceilings()
        reason = f"{refused} finite updates in a row stood out alike, even after a rewind: this is the new normal"
        return [self.decision(row, Action.ACCEPT, reason, overrides=self.overrides)]

    def without_ceilings(self, row: StepMetrics, reason: str) -> Decision:
        """The decision to refuse only what the policy itself refuses."""
        return self.decision(row, Action.RELAX, reason, overrides=self.overrides.without_ceilings())

    def next_remedy(self, row: StepMetrics, incident: Incident, cause: Cause, reason: str) -> list[Event]:
        """Decide for the next remedy, or stop the run when none is left or a limit is reached."""
        self.active = True
        events: list[Event] = []
        capped = self.outcome_pending and RemedyId.CAP in self._last_remedy
        if self.outcome_pending:
            events.append(self._outcome(row, helped=False))
            self.failures += 1
            self._tried += self._last_remedy
        if self._relaxed:
            self._relaxed, self._relax_after = False, 2 * self._relax_after
        early = not _ranks_differ(incident) and any(held.early for _, held in incident.facts(LrDropped))
        remedies = _remedies(incident, cause, early=early, capped=capped)
        tried = [] if remedies is REPLICA_REMEDIES else self._tried  # another such fault has the same answer
        remedy = next((r for r in remedies if r.id not in (*tried, *self._impossible)), None)
        exhausted = self.actions >= self._policy.max_actions
        if self.failures >= self._policy.max_failed_actions or remedy is None or exhausted:
            why = f"{self.failures} attempts in a row did not help"
            why = why if self.failures else "none of the remaining remedies can be applied"
            why = f"the limit of {self.actions} actions is reached (Policy.max_actions)" if exhausted else why
            stop = self.decision(row, Action.STOP, f"{reason}; {why}", cause=cause, max_attempt=incident.onset)
            return [*events, stop]
        keep = remedy.restore_loss_scale or remedy.keep_overrides
        overrides = self.overrides if keep else self._overrides_for(remedy, incident)
        self.actions += 1
        if not self._policy.observe:  # else nothing is in force, nor pending
            self._waiting_out = self._waiting_out if remedy.keep_overrides else remedy.tight_ceilings
            self._previous_overrides, self.overrides = self.overrides, overrides
            self._updates_since, self._healthy_updates, self._refusals = 0, 0, 0
            self._loss_before = self._signals.loss.median
        decision = self.decision(
            row,
            Action.REWIND if remedy.rewind else Action.CONSTRAIN,
            reason,
            **remedy.named,
            cause=cause,
            overrides=overrides,
            max_attempt=0 if early else _max_sound_attempt(incident),
            onset_known=not early and not self._tried and _onset_known(incident),
            reset_optimizer=remedy.reset_optimizer,
            loss_scale=_usual_loss_scale(incident) if remedy.restore_loss_scale else 0.0,
        )
        self._last = decision.action, remedy.id
        return [*events, decision]

    def action_failed(self) -> None:
        """The last remedy could not be applied: the next finding gets the next remedy."""
        self.active = True
        self._impossible += self._last_remedy
        self._updates_since = -1
        self.overrides = self._previous_overrides

    def proposal(self, row: StepMetrics, incident: Incident, cause: Cause) -> Decision:
        """The rewind to try out for an incident that does not call for an action by itself."""
        return self.decision(
            row,
            Action.REWIND,
            f"much of what was learnt is lost ({cause})",
            **REWIND.named,
            cause=cause,
            overrides=self._overrides_for(REWIND, incident),
            max_attempt=_max_sound_attempt(incident),
        )

    def restart(self, row: StepMetrics, reason: str) -> Decision:
        """The restart to try out for a run that was broken from its first update."""
        fields = {**RESTART.named, "cause": Cause.LEARNING_RATE, "max_attempt": 0}
        return self.decision(row, Action.REWIND, reason, overrides=self.overrides, **fields)

    def carried_out(self, decision: Decision, *, proposed: bool) -> None:
        """This decision is in force, as a trial has shaped it."""
        self.active = True
        if decision.overrides is not None:
            self.overrides = decision.overrides
        if decision.action in (Action.ACCEPT, Action.RELAX):
            self._waiting_out = False
        if decision.action is not Action.REWIND:
            return
        self.actions += proposed
        self._last = decision.action, decision.remedy_id
        self._healthy_updates = self._refusals = 0
        # The trial has shown that it helps, and little was lost: what was tried before does not count any more.
        self.failures, self._tried, self._updates_since = 0, [], 0
        self._loss_before = self._signals.loss.median

    def withdraw(self, decision: Decision) -> None:
        """This decision was not carried out: a trial showed that nothing is wrong."""
        if decision.action is Action.ACCEPT:  # the data does harm: go on refusing it
            self._waiting_out = True
            self.overrides = self._previous_overrides
        else:
            self.failures, self._tried, self._updates_since = 0, [], -1

    @property
    def _last_remedy(self) -> list[RemedyId]:
        """The last remedy, if there was one and it is known."""
        return [] if self._last is None or self._last[1] is None else [self._last[1]]

    def _overrides_for(self, remedy: Remedy, incident: Incident) -> StepOverrides:
        signals, before = self._signals, _max_sound_attempt(incident)
        count = 1 + max(signals.log_norms, default=-1)
        norms = [signals.log_norms[k].before(before) if k in signals.log_norms else None for k in range(count)]
        max_norms = [math.inf if known is None else known.max for known in norms]
        median_norms = [math.inf if known is None else known.median for known in norms]
        if median_norms and len(signals.log_applied_norms):
            median_norms[0] = min(median_norms[0], signals.log_applied_norms.median)  # the loop itself clips
        loss, tight = signals.loss.before(before), remedy.tight_ceilings
        ratio = CLEAR_RATIO if tight else TRIPLE_RATIO
        room = ratio * (loss.max - loss.median)
        room = room if tight else max(room, HUGE_RATIO * loss.sigma)
        healthy_lrs, healthy_momenta = _healthy_lrs(incident), incident.healthy_momenta
        return StepOverrides(
            lasting_lr_factor=self.overrides.lasting_lr_factor,
            lr_factor=remedy.lr_factor,
            rewarmup_steps=remedy.rewarmup_steps,
            max_lr=lower_caps(healthy_lrs, self.overrides.max_lr) if remedy.cap_settings else (),
            max_momentum=lower_caps(healthy_momenta, self.overrides.max_momentum) if remedy.cap_settings else (),
            clip=tuple(_exp(norm) for norm in median_norms) if remedy.clip else (),
            norm_ceiling=tuple(ratio * _exp(n) for n in max_norms) if remedy.ceilings and not remedy.clip else (),
            loss_ceiling=loss.max + room if remedy.ceilings and signals.can_bound_loss else math.inf,
            float32=remedy.float32,
            zero_stale_grads=remedy.zero_stale_grads,
        )

    def _outcome(self, row: StepMetrics, *, helped: bool) -> Outcome:
        action = Action.REWIND if self._last is None else self._last[0]
        recent, before = self._signals.recent_losses, self._loss_before
        loss = recent[-1] if recent else row.loss
        result = "it helped" if helped else "it did not help"
        what = "loss" if self._signals.judges_loss else "progress"
        earlier = f" and was {before:.4g} before the incident" if math.isfinite(before) else ""
        comparison = f": the {what} is {loss:.4g}{earlier}" if math.isfinite(loss) else ""
        values: dict[str, Any] = {"loss": loss, "before": before, "updates": self._updates_since}
        where: dict[str, Any] = {"step": row.step, "attempt": row.attempt, "time": row.time}
        return Outcome(**where, action=action, helped=helped, detail=f"{result}{comparison}", values=values)

    def decision(self, row: StepMetrics, action: Action, reason: str, **fields: Any) -> Decision:
        """A decision at this row; not applied where the policy only observes."""
        where: dict[str, Any] = {"step": row.step, "attempt": row.attempt, "time": row.time}
        return Decision(**where, action=action, reason=reason, applied=not self._policy.observe, **fields)

    def state_dict(self) -> dict[str, Any]:
        return {
            "restraint": self.overrides.as_json(),
            "failures": self.failures,
            "actions": self.actions,
            "tried": [remedy.value for remedy in self._tried],
            "cannot": [remedy.value for remedy in self._impossible],
            "since": self._updates_since,
            "calm": self._healthy_updates,
            "patience": self._relax_after,
            "loosened": self._relaxed,
            "refusals": self._refusals,
            "waits": self._waiting_out,
            "before": self._loss_before,
            "last": None if self._last is None else [self._last[0].value, *(r.value for r in self._last_remedy)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        overrides: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in renamed(state["restraint"], OVERRIDES).items()
        }
        self.overrides = self._previous_overrides = StepOverrides(**overrides)
        self.failures, self.actions = state["failures"], state["actions"]
        self._tried = load_remedies(state.get("tried", []))
        self._impossible = load_remedies(state.get("cannot", []))
        self._updates_since, self._healthy_updates = state["since"], state["calm"]
        self._relax_after, self._relaxed = state["patience"], state["loosened"]
        self._loss_before, self._refusals = state["before"], state["refusals"]
        self._waiting_out = state.get("waits", False)
        self._last = load_last(state["last"])
        self.active = True


def _remedies(incident: Incident, cause: Cause, *, early: bool, capped: bool) -> Sequence[Remedy]:
    """The remedies for an incident: by what was found, else by its cause."""
    by_finding = (
        (REPLICA_REMEDIES, _ranks_differ(incident)),
        (EARLY_REMEDIES, early),
        (STALE_GRADS_REMEDIES, bool(incident.found(FindingKind.STALE_GRADS))),
        (LOW_SCALE_REMEDIES, _usual_loss_scale(incident) > 0),
        (EVAL_HARM_REMEDIES, any(not held.raised for _, held in incident.facts(RegressionEvidence))),
        (CAP_REMEDIES, capped or raised_without_harm(incident)),
    )
    by_cause = REMEDIES_BY_CAUSE.get(cause, DEFAULT_REMEDIES)
    return next((remedies for remedies, applies in by_finding if applies), by_cause)


def _max_sound_attempt(incident: Incident) -> int:
    """States from before this attempt are sound: the onset, or a little earlier when the eval loss showed the harm
    late, for then the first finding may have been late too."""
    for _, held in incident.facts(RegressionEvidence):  # the lr may have been raised right after it was healthy
        return min(incident.onset, held.well if held.raised else max(held.well, incident.onset - WINDOW_ROWS))
    return incident.onset


def _ranks_differ(incident: Incident) -> bool:
    """The ranks hold different weights, and are to be made equal."""
    return any(f.severe for f in incident.found(FindingKind.REPLICAS))


def _onset_known(incident: Incident) -> bool:
    """It is known with which update this began, and that nothing was wrong before: the cause came from outside."""
    if _ranks_differ(incident) and incident.onset == incident.facts(ReplicasEvidence)[-1][1].well:
        return True
    if incident.found(FindingKind.EVAL_REGRESSION):
        return False
    dated = incident.found(FindingKind.CLIPPING_CHANGED) or rescaled_at_onset(incident)
    applied = any(step.row.applied for step in incident.steps)
    return bool(dated) or not applied or incident.first.input_novelty >= 1


def _healthy_lrs(incident: Incident) -> Sequence[float]:
    """The healthy learning rates; the eval loss knows best when the run was healthy."""
    by_eval = [held.rate for _, held in incident.facts(RegressionEvidence)]
    return lower_caps(incident.healthy_lrs, by_eval[:1])


def _usual_loss_scale(incident: Incident) -> float:
    """The loss scale before it fell too low; 0 when it did not."""
    return next((held.usual for finding, held in incident.facts(ScaleFell) if finding.severe), 0.0)


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))
