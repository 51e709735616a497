"""One row in, events out: what was seen, why, what is to be done about it, and whether the last thing helped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from surefoot.judge.baselines import Baselines
from surefoot.judge.cause_catalog import CAUSES
from surefoot.judge.decision_tree import Facts, walk
from surefoot.judge.detectors.base import Detector
from surefoot.judge.detectors.bottleneck import Bottleneck
from surefoot.judge.detectors.clipping import Clipping
from surefoot.judge.detectors.eval_regression import EvalRegression
from surefoot.judge.detectors.evaluation import Evaluation
from surefoot.judge.detectors.fewsamples import FewSamples
from surefoot.judge.detectors.frozen_weights import FrozenWeights
from surefoot.judge.detectors.growth import Growth
from surefoot.judge.detectors.inputs import Inputs
from surefoot.judge.detectors.jump import Jump
from surefoot.judge.detectors.layers import Dead, Exploding, LayerPast, Vanishing
from surefoot.judge.detectors.level import Level
from surefoot.judge.detectors.loss_rescaled import LossRescaled
from surefoot.judge.detectors.lossscale import LossScale
from surefoot.judge.detectors.lostclip import LostClip
from surefoot.judge.detectors.memory import MemoryCreep
from surefoot.judge.detectors.nonfinite import NonFinite
from surefoot.judge.detectors.norm_outlier import NormOutlier
from surefoot.judge.detectors.oscillation import Oscillation
from surefoot.judge.detectors.periodic_spikes import PeriodicSpikes
from surefoot.judge.detectors.plateau import Plateau
from surefoot.judge.detectors.repeated_batches import RepeatedBatches
from surefoot.judge.detectors.replicas import Replicas
from surefoot.judge.detectors.settings import Settings
from surefoot.judge.detectors.slow_steps import SlowSteps
from surefoot.judge.detectors.stale_grads import StaleGrads
from surefoot.judge.detectors.start import Start
from surefoot.judge.detectors.weights import Weights
from surefoot.judge.incident import Incident, evidence_of
from surefoot.judge.incident_tracker import IncidentTracker
from surefoot.judge.nan_causes import cause_of
from surefoot.judge.param_roles import Role, role_of
from surefoot.judge.policy import AGAIN, LONG, UNDER_WAY, WHILE, Policy
from surefoot.judge.progress_filter import ProgressFilter
from surefoot.judge.rank_causes import rank_causes
from surefoot.judge.remediation import Remediation
from surefoot.judge.remedies import EQUAL
from surefoot.judge.severity import is_severe
from surefoot.records import (
    Action,
    Cause,
    Decision,
    Diagnosis,
    Event,
    Finding,
    Pattern,
    StepMetrics,
    StepOverrides,
    Verdict,
)

REFUSED = (Verdict.NONFINITE, Verdict.NORM_OUTLIER)
ASIDE = frozenset(
    {"bottleneck", "pace", "memory", "clipping", "plateau", "rhythm", "repeats", "start", "evaluation", "progress"}
)
"""What these find is told, with its cause, and is never a reason to touch the run."""


class Judge:
    """Runs the detectors over each row, names causes, and decides within the policy's limits.

    The same rows give the same decisions on every process: nothing that is measured on one of them alone, such as
    times and memory, or where in its model a value that is not finite came up, is a reason to act.
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
        contested: bool = False,
        buffers: Sequence[str] = (),
    ) -> None:
        self.policy = policy
        self.names = names
        """Of the tensors, in the order of the rows of `layers`; the first `owned` of them are held by an optimizer, and
        hold so many `values` (0 where that is not known), which their `first` update moves by so many rates.
        `kinds` are the classes of the modules that hold them; `adaptive` optimizers divide by past gradients; a run
        that is `alone` has but this process; for `contested` see `Normal`; `buffers` are those that are checked."""
        self.buffers = buffers
        self.proven = -1
        """States taken at this attempt or before it are known to be good by the steps that followed."""
        self._adaptive = adaptive
        roles = [role_of(name, kind) for name, kind in zip_longest(names, kinds[: len(names)], fillvalue="")]
        self.normal = Baselines(policy.thresholds, contested=contested)
        self._progress = ProgressFilter()
        self._alone = alone
        self._past = LayerPast()
        self._units = LossRescaled(self.normal, self._past)
        inputs = Inputs(policy.thresholds)
        normed = any(kind.startswith(("BatchNorm", "SyncBatchNorm")) for kind in kinds)
        self._book = IncidentTracker(
            self.normal,
            self._past,
            self._units,
            inputs,
            heads=[k for k, role in enumerate(roles) if role is Role.ATTENTION],
            normed=normed,
            adaptive=adaptive,
            values=values,
            first=first,
            reach=policy.snapshot_reach,
        )
        self._replicas = Replicas()
        self._outright: Sequence[NonFinite | NormOutlier] = (NonFinite(buffers), NormOutlier(self.normal))
        self.detectors: Sequence[Detector] = (
            self._units,
            inputs,
            FewSamples(self.normal, normed=normed),
            Weights(),
            StaleGrads(),
            LostClip(self.normal),
            Settings(self.normal),
            LossScale(policy.thresholds),
            FrozenWeights(names, owned, self.normal, self._past, adaptive=adaptive),
            Jump(self.normal),
            Level(self.normal, self._units),
            Growth(self.normal),
            Oscillation(self.normal),
            Exploding(self._past, names, policy.thresholds),
            Vanishing(self._past, names, policy.thresholds),
            Dead(self._past, names, policy.thresholds),
            PeriodicSpikes(self.normal),
            RepeatedBatches(policy.thresholds),
            Start(policy.thresholds),
            Plateau(self.normal),
            Evaluation(self.normal),
            EvalRegression(self.normal, alone=alone),
            Clipping(policy.thresholds),
            SlowSteps(policy.thresholds),
            MemoryCreep(policy.thresholds),
            Bottleneck(policy.thresholds),
            self._replicas,
        )
        self._treatment = Remediation(policy, self.normal)
        self._refused = 0
        self._overflows = 0
        self._attempt = -1
        self._awaits = False
        """A rewind was decided and is still to come: what happens until then is of no account."""
        self._blind = -1
        """Up to this attempt updates were made before what was decided came into force."""
        self.held = False
        """Another judge of the same run has decided that it goes back: nothing is decided until then."""

    @property
    def rewind_pending(self) -> bool:
        """A rewind was decided and is still to come."""
        return self._awaits

    @property
    def restraints(self) -> list[tuple[tuple[int, ...], StepOverrides]]:
        """What is asked of which optimizers; none named are all of them."""
        return [((), self.restraint)]

    @property
    def quiet(self) -> bool:
        """Nothing is amiss, so that a state may be taken now."""
        return self._book.case is None and self._refused == 0

    @property
    def restraint(self) -> StepOverrides:
        """What is asked of the steps."""
        return self._treatment.restraint

    @property
    def wants_weight_check(self) -> bool:
        """A look at the weights would help to tell what has happened."""
        return self._book.curious

    def rewound(self, attempt: int, step: int) -> None:
        """The run went back to the state it had after this attempt."""
        self.normal.rewound(attempt)
        for detector in self.detectors:
            detector.rewound()
        self._replicas.went_back(attempt)
        self.proven = min(self.proven, attempt)
        self._book.close()
        self.held = False
        self._overflows, self._awaits, self._blind = 0, False, -1  # refusals are counted until an update lands

    def rewired(self, names: Sequence[str], scopes: Sequence[tuple[int, int]]) -> None:
        """The optimizers hold other tensors now."""
        self.names = names

    def _watch_anew(self) -> None:
        """A trouble was answered in its place: what was being watched tells of before."""
        self._blind = -1
        self._book.blink()
        self.normal.recent.clear()
        for detector in self.detectors:
            detector.rewound()

    def failed(self, decision: Decision, why: str) -> None:
        """What was decided could not be done; the next rung is tried at the next sign of trouble."""
        self._treatment.failed()
        self._awaits = False
        if decision.remedy == EQUAL.words:
            self._replicas.cannot_restore(why)
            if self._book.case is not None:
                self._book.case.findings = [f for f in self._book.case.findings if f.detector != "replicas"]

    def located(self, row: StepMetrics, module: str, kind: str, *, inputs: bool, weights: bool) -> list[Event]:
        """In which module a value that is not finite came up was found out, after its row was judged."""
        cause, why = cause_of(module, kind, inputs=inputs, weights=weights)
        finding = Finding(
            step=row.step,
            attempt=row.attempt,
            time=row.time,
            detector="origin",
            pattern=Pattern.NONFINITE,
            detail=why,
            evidence={"module": module, "kind": kind, "inputs": inputs, "weights": weights, "cause": cause},
        )
        if self._book.case is not None and self._alone:
            self._book.case.findings.append(finding)
        return [finding]

    # -- one row

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Event]:
        """Findings first, then what they mean, then what is decided."""
        self._count(row)
        if layers is not None and row.optimizer == 0:
            self._past.take(row, layers, learn=row.applied and self._book.learns)
        self.normal.asked = self._treatment.restraint
        self.normal.expect(row)
        found = [f for d in self._outright for f in d.update(row)]
        found += self._told_of_progress(row)
        raw, row = row, self._progress.judged(row)
        self.normal.judges_loss = row is raw
        found += [f for d in self.detectors for f in d.update(row, layers)]
        refused = row.verdict in REFUSED
        # Of more refusals in a row than that, only the 128th, the 256th and so on are told.
        silent = refused and self._refused > LONG and self._refused & (self._refused - 1)
        events: list[Event] = [] if silent else [*found]
        if found:
            events += self._aside(row, [f for f in found if _told_only(f)])
        self._book.follow(row, layers, [f for f in found if not _told_only(f)])
        if refused and not silent:
            reason = "; ".join(f.detail for f in found if f.detector in ("nonfinite", "norm_outlier"))
            events.append(self._decision(row, Action.REFUSE, reason))
        events += self._named(row)
        events += self._decided(row, events)
        self.normal.take(row)
        self._prove(row)
        return events

    def _told_of_progress(self, row: StepMetrics) -> list[Finding]:
        """Stop judging a loss that turns out to be no measure of progress, and say so once."""
        if not self._progress.update(row):
            return []
        self.normal.forget_losses()
        for detector in self.detectors:
            detector.rewound()
        return [
            Finding(
                step=row.step,
                attempt=row.attempt,
                time=row.time,
                detector="progress",
                detail="the loss stays around zero with both signs, so it is only checked for being finite; pass "
                "guard.watch(loss, progress=...) a number that falls as the run gets better, such as -reward",
                evidence={"loss": row.loss, "optimizer": row.optimizer},
            )
        ]

    def _count(self, row: StepMetrics) -> None:
        if row.applied:
            self._refused = self._overflows = 0
        if row.attempt != self._attempt:  # an update counts once, however many optimizers took part in it
            if not row.applied:
                self._refused += row.verdict in REFUSED
                self._overflows += row.verdict is Verdict.OVERFLOW
            self._attempt = row.attempt

    def _prove(self, row: StepMetrics) -> None:
        if self._book.case is None and row.applied:
            self.proven = max(self.proven, row.attempt - self.policy.healthy_steps_to_trust)

    # -- the cause

    def _named(self, row: StepMetrics) -> list[Event]:
        """The cause, once enough is known: what follows the first sign tells one cause from another, and by then the
        weights have been looked at. A vague case is given longer."""
        case = self._book.case
        if case is None or case.named or not case.findings or not case.moments:
            return []
        vague = rank_causes(case)[0][1] < 0.5
        if len(case.moments) <= (WHILE if vague else 2 * AGAIN) and not self._grave(case):
            return []
        case.named = True
        return self._diagnoses(row, case)

    def _grave(self, case: Incident) -> str:
        return is_severe(case, adaptive=self._adaptive, clipped=bool(self._treatment.restraint.clip))

    def _diagnoses(self, row: StepMetrics, case: Incident) -> list[Event]:
        ranked = rank_causes(case)
        path = walk(
            Facts(
                step=row.step,
                mixed_precision=not math.isnan(row.loss_scale),
                scaled=not math.isnan(row.loss_scale),
                large_gradients=case.first.norm_ratio > math.log(self.policy.thresholds.jump),
                good_state=self.proven >= 0,
                pattern=_pattern(case.findings),
            )
        )
        evidence = evidence_of(case) | {"path": path.as_text()}
        return [
            Diagnosis(
                step=row.step,
                attempt=row.attempt,
                time=row.time,
                cause=cause,
                confidence=sure,
                evidence=evidence if place == 0 else {},
                advice=CAUSES[cause].remedies if place else (*CAUSES[cause].remedies, *path.advice),
                detail=f"{CAUSES[cause].sentence} {why}",
            )
            for place, (cause, sure, why) in enumerate(ranked[:3])
        ]

    def _aside(self, row: StepMetrics, found: Sequence[Finding]) -> list[Event]:
        """What is told with its cause and is no reason to act."""
        telling = [f for f in found if f.detector not in ("clipping", "rhythm", "replicas", "progress")]
        if not telling or self._book.case is not None:
            return []
        case = self._book.opened(row, telling)
        case.moments.append(self._book.moment(row, None))
        return self._diagnoses(row, case)

    # -- what is done

    def _decided(self, row: StepMetrics, events: Sequence[Event]) -> list[Event]:
        if self._awaits or self.held:
            return []
        if 0 <= self._blind < row.attempt:
            self._watch_anew()
        limit = self.policy.max_vetoes_waiting if self._treatment.holds(row) else self.policy.max_consecutive_vetoes
        if self._refused == limit or (self._refused > limit and not self.policy.observe):
            return [self._decision(row, Action.STOP, self._why_refused(row, events))]
        if row.verdict is Verdict.NORM_OUTLIER:
            self._treatment.refused()
            if self._treatment.holds(row):
                return []  # what this run waits out
        return self._treated(row)

    def _treated(self, row: StepMetrics) -> list[Event]:
        case = self._book.case
        why = self._grave(case) if case is not None and case.moments and self._blind < 0 else ""
        if case is not None and why and not (self.policy.observe and case.treated):
            case.treated = True
            return self._treatment_of(row, case, why)
        if self._overflows == self.policy.max_consecutive_overflows:
            return [self._decision(row, Action.STOP, self._why_overflows(row))]
        return self._treatment.watch(row, trouble=case is not None and self._book.quiet_rows == 0)

    def _treatment_of(self, row: StepMetrics, case: Incident, why: str) -> list[Event]:
        accepted = self._treatment.accept(row, self._refused)
        if accepted:
            self._book.close()
            return accepted
        cause = next((c for c, _, _ in rank_causes(case)), Cause.UNKNOWN)
        decided = self._treatment.act(row, case, cause, why)
        done = {d.action for d in decided if isinstance(d, Decision) and d.applied}
        self._awaits = Action.REWIND in done
        if Action.CONSTRAIN in done:
            self._blind = row.attempt + UNDER_WAY
        self._book.answered(case)
        return decided

    def _why_refused(self, row: StepMetrics, found: Sequence[Event]) -> str:
        last = next((e.reason for e in found if isinstance(e, Decision)), "")
        if self._treatment.holds(row):
            way_out = "Training on such batches has made the loss on held-out data worse: look at the data since then."
        elif row.nonfinite_params > 0:
            way_out = "The weights themselves are damaged: go back to a checkpoint from before."
        elif row.verdict is Verdict.NORM_OUTLIER:
            way_out = (
                "Look at the batches since then, lower the learning rate or clip. If this level is meant to be, allow "
                "it with policy=surefoot.Policy(outlandish=...)."
            )
        else:
            way_out = "Look at the batches since then; lower the learning rate, clip, or use bfloat16 or float32."
        return (
            f"{self._refused} updates in a row were refused, the last at step {row.step} "
            f"(attempt {row.attempt}): {last}. None of them touched weights or optimizer. {way_out}"
        )

    def _why_overflows(self, row: StepMetrics) -> str:
        return (
            f"the loss scale overflowed {self._overflows} times in a row (it is now {row.loss_scale:.3g}), so no "
            "update has landed: the gradients themselves are not finite. Use bfloat16 or float32, or look at the "
            "batches since then."
        )

    def _decision(self, row: StepMetrics, action: Action, reason: str) -> Decision:
        return Decision(
            step=row.step,
            attempt=row.attempt,
            time=row.time,
            action=action,
            reason=reason,
            applied=not self.policy.observe,
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "refused": self._refused,
            "overflows": self._overflows,
            "attempt": self._attempt,
            "proven": self.proven,
            "awaits": self._awaits,
            "blind": self._blind,
            "book": self._book.state_dict(),
            "normal": self.normal.state_dict(),
            "progress": self._progress.state_dict(),
            "past": self._past.state_dict(),
            "treatment": self._treatment.state_dict(),
            "detectors": [d.state_dict() for d in self.detectors],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Know again what was known then; of a state that does not fit nothing is taken."""
        before = self.state_dict()
        try:
            self._load(state)
        except Exception:
            self._load(before)
            raise

    def _load(self, state: dict[str, Any]) -> None:
        self._refused, self._overflows, self._attempt = state["refused"], state["overflows"], state["attempt"]
        self.proven, self._awaits, self._blind = state["proven"], state["awaits"], state.get("blind", -1)
        self._book.load_state_dict(state["book"])
        self.normal.load_state_dict(state["normal"])
        self._progress.load_state_dict(state.get("progress", {"signs": {}, "around_zero": []}))
        self._past.load_state_dict(state["past"])
        self._treatment.load_state_dict(state["treatment"])
        # A state saved by an earlier version knows nothing of the last detectors, which begin anew.
        if len(state["detectors"]) not in (len(self.detectors), len(self.detectors) - 1):
            raise ValueError(f"{len(state['detectors'])} detectors were saved, and there are {len(self.detectors)}")
        for detector, held in zip(self.detectors, state["detectors"], strict=False):
            detector.load_state_dict(held)


def _told_only(finding: Finding) -> bool:
    """Told, and never a reason to touch the run."""
    return finding.detector in ASIDE or (finding.detector == "replicas" and not finding.severe)


def _pattern(findings: Sequence[Finding]) -> Pattern:
    return next((f.pattern for f in findings if f.pattern is not Pattern.NONE), Pattern.NONE)
