"""One row in, events out: findings, their likely cause, what to do about it, and whether the last action helped."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from surefoot.journal.aliases import upgraded_judge_state
from surefoot.judge.detectors import Detectors, ModelFacts
from surefoot.judge.detectors.base import finding_at
from surefoot.judge.diagnosis import diagnose_incident, overflow_reason, refused_reason
from surefoot.judge.early_learning import EarlyLearning
from surefoot.judge.harm import Harm, harm_of
from surefoot.judge.history import AROUND_ZERO, PendingEffect, ProgressFilter, RefusalCounter
from surefoot.judge.incident import NO_DIAGNOSIS, VETO_DETECTORS, Incident, Stage
from surefoot.judge.incident_tracker import IncidentTracker
from surefoot.judge.origin_finding import origin_finding
from surefoot.judge.param_roles import Role, language_part, role_of
from surefoot.judge.policy import Policy
from surefoot.judge.rank_causes import rank_causes
from surefoot.judge.remediation import Remediation
from surefoot.judge.signals import Sign, Signals
from surefoot.judge.thresholds import REPEAT_COUNT, WINDOW_ROWS
from surefoot.records import (
    REFUSED,
    Action,
    Cause,
    Decision,
    Event,
    Finding,
    FindingKind,
    RemedyId,
    Severity,
    StepMetrics,
    StepOverrides,
    Verdict,
)

CHANGED_BY_TRIALS = frozenset({Action.REWIND, Action.CONSTRAIN, Action.ACCEPT, Action.RELAX})
"""Decisions that a trial may change or lead to."""


class Judge:
    """Runs the detectors over each row, ranks causes, and decides within the policy's limits.

    The same rows give the same decisions on every rank: what is measured on one rank alone, such as times, memory, or
    the module in which a non-finite value first appeared, is never a reason to act.

    `names` are those of the tensors, in the order of the rows of `layers`; the first `owned` of them are held by an
    optimizer and have `values` elements in all (0 if unknown), which the `first` update moves by so many learning
    rates. `kinds` are the classes of the modules that hold the tensors. An `adaptive` optimizer divides by past
    gradients. `alone` means a single rank. For `adversarial` see `Signals`. `buffers` are those checked for NaN.
    """

    def __init__(
        self,
        policy: Policy,
        names: Sequence[str] = (),
        *,
        kinds: Sequence[str] = (),
        owned: int | None = None,
        values: int = 0,
        first: float = 1.0,
        adaptive: bool = True,
        alone: bool = True,
        adversarial: bool = False,
        buffers: Sequence[str] = (),
    ) -> None:
        self.policy = policy
        self.names = names
        self.buffers = buffers
        self.proven = -1
        """States taken at this attempt or before are known to be good, by the healthy steps that followed."""
        self._adaptive = adaptive
        self._alone = alone
        thresholds = policy.thresholds
        roles = [role_of(name, kind) for name, kind in zip_longest(names, kinds[: len(names)], fillvalue="")]
        has_batch_norm = any(kind.startswith(("BatchNorm", "SyncBatchNorm")) for kind in kinds)
        self.signals = Signals(thresholds, adversarial=adversarial)
        self._progress = ProgressFilter()
        model = ModelFacts(
            names=names,
            owned=owned,
            adaptive=adaptive,
            single_rank=alone,
            has_batch_norm=has_batch_norm,
            buffers=buffers,
        )
        self.detectors = Detectors(self.signals, model)
        self._tracker = IncidentTracker(
            self.signals,
            self.detectors.loss_rescaled,
            self.detectors.input_shift,
            attention_tensors=[k for k, role in enumerate(roles) if role is Role.ATTENTION],
            language_tensors=language_part(names),
            has_batch_norm=has_batch_norm,
            adaptive=adaptive,
            num_values=values,
            first_update_lrs=first,
            reach=policy.snapshot_reach,
        )
        self._remediation = Remediation(policy, self.signals)
        self.early = EarlyLearning()
        self.restart: Decision | None = None
        """A restart that a trial may find worthwhile, because the run seems broken since its first update."""
        self._refusals = RefusalCounter()
        self._pending = PendingEffect()
        self.suspicion: Decision | None = None
        """A rewind that a trial may find worthwhile, for an incident that the last row has led to diagnose."""
        self.decisions_paused = False
        """Another judge of the same run has decided to rewind: decide nothing until then."""

    @property
    def rewind_pending(self) -> bool:
        """A rewind was decided and has not happened yet: rows until then do not count."""
        return self._pending.rewind

    @property
    def overrides_by_optimizer(self) -> list[tuple[tuple[int, ...], StepOverrides]]:
        """The overrides in force and the optimizers they apply to; an empty tuple stands for all."""
        return [((), self.overrides)]

    @property
    def quiet(self) -> bool:
        """Nothing is wrong, so that a snapshot may be taken now."""
        return self._tracker.incident is None and self._refusals.refused == 0

    @property
    def overrides(self) -> StepOverrides:
        """The overrides in force."""
        return self._remediation.overrides

    @property
    def wants_weight_check(self) -> bool:
        """A check of the weights would help to find the cause of the open incident."""
        return self._tracker.incident is not None and self._tracker.wants_weight_check

    def rewound(self, attempt: int, step: int) -> None:
        """The run was rewound to the state after this attempt."""
        self.signals.rewound(attempt)
        for detector in self.detectors.all:
            detector.rewound()
        self.detectors.replicas.rewound_to(attempt)
        self.early.rewound()
        self.proven = min(self.proven, attempt)
        self._tracker.close()
        self.decisions_paused = False
        self._refusals.overflows = 0  # the count of refused updates goes on until one is applied
        self._pending.clear()

    def rewired(self, names: Sequence[str], scopes: Sequence[tuple[int, int]]) -> None:
        """The optimizers hold other tensors now."""
        self.names = names

    def _decision_took_effect(self) -> None:
        """A decision without a rewind is in force: what was being watched is about the time before."""
        self._pending.clear()
        self._tracker.forget_earlier_signs()
        self.signals.forget_recent()
        for detector in self.detectors.all:
            detector.rewound()

    def failed(self, decision: Decision, why: str) -> None:
        """A decision could not be carried out; the next finding gets the next remedy."""
        self._remediation.action_failed()
        if self.rewind_pending:
            self._pending.clear()
        if decision.remedy_id is RemedyId.EQUAL_WEIGHTS:
            self.detectors.replicas.restore_failed(why)
            incident = self._tracker.incident
            if incident is not None:
                incident.findings = [f for f in incident.findings if f.detector is not FindingKind.REPLICAS]

    def carried_out(self, decision: Decision, *, proposed: bool) -> None:
        """A trial has changed this decision; `proposed` if it has led to it, from a suspicion."""
        if decision.action not in CHANGED_BY_TRIALS:
            return
        self._remediation.carried_out(decision, proposed=proposed)
        if decision.remedy_id is RemedyId.RESTART:
            self.early.restarted()
        if decision.action is Action.ACCEPT:  # other data from here on: what is normal has to be learnt again
            self.signals.drop_losses()
        if decision.action in (Action.ACCEPT, Action.RELAX):
            self._tracker.close()
            self._refusals.refused = 0
        if decision.action is not Action.REWIND:
            self._pending.in_force(self._refusals.attempt)

    def without_ceilings(self, row: StepMetrics, reason: str) -> Decision:
        """The decision to make updates again that the overrides refuse."""
        return self._remediation.without_ceilings(row, reason)

    def dismissed(self, decision: Decision, *, proposed: bool) -> None:
        """A trial showed that nothing is wrong: the incident is over, unless the decision was only proposed."""
        if decision.remedy_id is RemedyId.RESTART:
            self.early.dismissed()
            return
        if proposed and decision.action is not Action.ACCEPT:
            return
        self._remediation.withdraw(decision)
        self._pending.clear()
        self._tracker.close()

    def located(self, row: StepMetrics, module: str, kind: str, **where: Any) -> list[Event]:
        """Where a non-finite value first appeared was found, after its row was judged; see `origin_finding`."""
        finding = origin_finding(row, module, kind, **where)
        if self._tracker.incident is not None and self._alone:
            self._tracker.incident.findings.append(finding)
        return [finding]

    # -- one row

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Event]:
        """Judge one row: findings first, then diagnoses, then decisions."""
        self._refusals.update(row)
        self.suspicion = self.restart = None
        signals, tracker = self.signals, self._tracker
        signals.overrides = self._remediation.overrides
        findings: list[Finding] = []
        if row.verdict or row.nonfinite_params > 0:
            findings += [finding for detector in self.detectors.of_vetoes for finding in detector.update(row)]
        if self._progress.update(row):
            findings.append(self._stop_judging_loss(row))
        original = row
        if row.judged_by or self._progress.around_zero:
            row = self._progress.judged(row)
        signals.judges_loss = row is original
        if not self.early.proven and not row.optimizer and signals.judges_loss and not signals.adversarial:
            trouble = self.early.update(row)
            if trouble is not None:
                findings.append(trouble)
                self.restart = self._remediation.restart(row, trouble.detail)
        signs = signals.compare(row, layers, learn=tracker.incident is None or tracker.can_learn)
        for detector in self.detectors.all:
            if detector.wakes_on & signs or detector.watching:
                findings += detector.update(row, layers)
        if findings or tracker.incident is not None or not row.applied:
            events = self._judge_trouble(row, layers, findings)
        else:  # nothing is wrong: at most an earlier decision has yet to show whether it helped
            if signs & Sign.WEIGHTS:
                tracker.update(row, layers, ())
            undecided = self._remediation.active or self._pending
            events = self._decide(row, ()) if undecided else []
        signals.add(row)
        if tracker.incident is None and row.applied:
            self.proven = max(self.proven, row.attempt - self.policy.healthy_steps_to_trust)
        return events

    def _stop_judging_loss(self, row: StepMetrics) -> Finding:
        """The loss turned out to be no measure of progress; that is reported once."""
        self.signals.drop_losses()
        for detector in self.detectors.all:
            detector.rewound()
        evidence = {"loss": row.loss, "optimizer": row.optimizer}
        return finding_at(row, FindingKind.PROGRESS, AROUND_ZERO, evidence, severity=Severity.REPORT_ONLY)

    def _judge_trouble(self, row: StepMetrics, layers: np.ndarray | None, findings: list[Finding]) -> list[Event]:
        refused = row.verdict in REFUSED
        silent = refused and self._refusals.old_news
        events: list[Event] = [] if silent else [*findings]
        if findings:
            events += self._diagnose_reports(row, [f for f in findings if f.severity is Severity.REPORT_ONLY])
        self._tracker.update(row, layers, [f for f in findings if f.severity is not Severity.REPORT_ONLY])
        if refused and not silent:
            reason = "; ".join(f.detail for f in findings if f.detector in VETO_DETECTORS)
            events.append(self._remediation.decision(row, Action.REFUSE, reason))
        events += self._diagnose(row)
        decisions = self._decide(row, events)
        self.suspicion = None if decisions else self._suspect(row)
        events += decisions
        return events

    # -- the cause

    def _diagnose(self, row: StepMetrics) -> list[Event]:
        """Diagnose the incident once enough is known: the rows after the first finding tell causes apart, and by then
        the weights were checked. An unclear incident gets more rows."""
        incident = self._tracker.incident
        if incident is None or incident.stage is not Stage.OPEN or not incident.findings or not incident.steps:
            return []
        unclear = rank_causes(incident)[0][1] < 0.5
        min_steps = WINDOW_ROWS if unclear else 2 * REPEAT_COUNT
        if len(incident.steps) <= min_steps and not self._harm(incident):
            return []
        incident.stage = Stage.DIAGNOSED
        if self.early.doubtful and self.signals.judges_loss and not self.signals.adversarial:
            reason = f"nothing is learnt for certain yet, and {incident.findings[0].detail}"
            self.restart = self.restart or self._remediation.restart(row, reason)
        return [*diagnose_incident(row, incident, has_good_state=self.proven >= 0)]

    def _suspect(self, row: StepMetrics) -> Decision | None:
        """A rewind to try out, when an incident is diagnosed or later."""
        incident = self._tracker.take_lost() if row.applied and not self._pending else None
        return None if incident is None else self._remediation.proposal(row, incident, rank_causes(incident)[0][0])

    def _harm(self, incident: Incident) -> Harm | None:
        return harm_of(incident, adaptive=self._adaptive, clipped=bool(self.overrides.clip))

    def _diagnose_reports(self, row: StepMetrics, findings: Sequence[Finding]) -> list[Event]:
        """Diagnose findings that are only reported."""
        findings = [f for f in findings if f.detector not in NO_DIAGNOSIS]
        if not findings or self._tracker.incident is not None:
            return []
        incident = self._tracker.new_incident(row, findings)
        incident.steps.append(self._tracker.incident_step(row, None))
        return [*diagnose_incident(row, incident, has_good_state=self.proven >= 0)]

    # -- the decision

    def _decide(self, row: StepMetrics, events: Sequence[Event]) -> list[Event]:
        if self.rewind_pending or self.decisions_paused:
            return []
        if self._pending.arrived(row.attempt):
            self._decision_took_effect()
        waiting = self._remediation.is_waiting_out(row)
        limit = self.policy.max_vetoes_waiting if waiting else self.policy.max_consecutive_vetoes
        refused = self._refusals.refused
        if refused == limit or (refused > limit and not self.policy.observe):
            return [self._stop_refused(row, events, waiting=waiting)]
        if row.verdict is Verdict.NORM_OUTLIER:
            self._remediation.count_refusal()
            if waiting:
                return []
        return self._decide_on_incident(row)

    def _decide_on_incident(self, row: StepMetrics) -> list[Event]:
        incident = self._tracker.incident
        ready = incident is not None and incident.steps and not self._pending
        harm = self._harm(incident) if incident is not None and ready else None
        if incident is not None and harm and not (self.policy.observe and incident.stage is Stage.ACTED_ON):
            incident.stage = Stage.ACTED_ON
            return self._act(row, incident, harm.reason)
        if self._refusals.overflows == self.policy.max_consecutive_overflows:
            return [self._remediation.decision(row, Action.STOP, overflow_reason(row, self._refusals.overflows))]
        return self._remediation.update(row, trouble=incident is not None and self._tracker.quiet_rows == 0)

    def _act(self, row: StepMetrics, incident: Incident, reason: str) -> list[Event]:
        accepted = self._remediation.accept(row, self._refusals.refused)
        if accepted:
            self._tracker.close()
            return accepted
        cause = next((cause for cause, _, _ in rank_causes(incident)), Cause.UNKNOWN)
        events = self._remediation.next_remedy(row, incident, cause, reason)
        applied = {event.action for event in events if isinstance(event, Decision) and event.applied}
        self._pending.decided(applied, row.attempt)
        self._tracker.acted_on(incident)
        return events

    def _stop_refused(self, row: StepMetrics, events: Sequence[Event], *, waiting: bool) -> Decision:
        last = next((event.reason for event in events if isinstance(event, Decision)), "")
        reason = refused_reason(row, self._refusals.refused, last, waiting=waiting)
        return self._remediation.decision(row, Action.STOP, reason)

    # -- state

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._refusals.state_dict(),
            "proven": self.proven,
            "awaits": self.rewind_pending,
            "blind": self._pending.blind_until,
            "book": self._tracker.state_dict(),
            "normal": self.signals.state_dict(),
            "progress": self._progress.state_dict(),
            "past": self.signals.layers.state_dict(),
            "treatment": self._remediation.state_dict(),
            "early": None if self.early.proven else self.early.state_dict(),
            "detectors": {detector.kind.value: detector.state_dict() for detector in self.detectors.all},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state; one that does not fit raises and leaves this judge as it was."""
        before = self.state_dict()
        try:
            self._load(state)
        except Exception:
            self._load(before)
            raise

    def _load(self, state: dict[str, Any]) -> None:
        state = upgraded_judge_state(state)
        self._refusals.load_state_dict(state)
        self.proven = state["proven"]
        self._pending.load(rewind=state["awaits"], blind_until=state.get("blind", -1))
        self._tracker.load_state_dict(state["book"])
        self.signals.load_state_dict(state["normal"])
        self.signals.layers.load_state_dict(state["past"])
        self._progress.load_state_dict(state.get("progress", {"signs": {}, "around_zero": []}))
        self._remediation.load_state_dict(state["treatment"])
        if state.get("early") is None:  # learning is proven, or an earlier version has saved this
            self.early.proven = True
        else:
            self.early.load_state_dict(state["early"])
        saved = state["detectors"]
        for detector in self.detectors.all:
            if detector.kind in saved:  # one that an earlier version did not have starts afresh
                detector.load_state_dict(saved[detector.kind])
