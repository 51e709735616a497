"""One row in, events out: what was seen, why, what is to be done about it, and whether the last thing helped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from surefoot.judge.detect.base import Detector
from surefoot.judge.detect.bottleneck import Bottleneck
from surefoot.judge.detect.clipping import Clipping
from surefoot.judge.detect.growth import Growth
from surefoot.judge.detect.jump import Jump
from surefoot.judge.detect.layers import NONFINITE, NORM, Dead, Exploding, LayerPast, Vanishing
from surefoot.judge.detect.level import Level
from surefoot.judge.detect.lossscale import LossScale
from surefoot.judge.detect.memory import MemoryCreep
from surefoot.judge.detect.nonfinite import NonFinite
from surefoot.judge.detect.oscillation import Oscillation
from surefoot.judge.detect.outlandish import Outlandish
from surefoot.judge.detect.pace import Pace
from surefoot.judge.detect.plateau import Plateau
from surefoot.judge.detect.repeats import Repeats
from surefoot.judge.detect.rhythm import Rhythm
from surefoot.judge.detect.settings import Settings
from surefoot.judge.detect.start import Start
from surefoot.judge.detect.still import Still
from surefoot.judge.detect.units import Units
from surefoot.judge.diagnose.case import Case, Moment, compared, evidence_of, least
from surefoot.judge.diagnose.causes import CAUSES
from surefoot.judge.diagnose.name import causes
from surefoot.judge.diagnose.roles import Role, role_of
from surefoot.judge.diagnose.tree import Facts, walk
from surefoot.judge.normal import Normal
from surefoot.judge.policy import Policy
from surefoot.judge.treat import Treatment, grave
from surefoot.records import Action, Cause, Decision, Diagnosis, Event, Finding, Pattern, Row, Verdict

TALK = 50
"""Refusals in a row that are each told; after that only the 64th, 128th and so on."""
ASIDE = frozenset({"bottleneck", "pace", "memory", "clipping", "plateau", "rhythm", "repeats", "start"})
"""What these find is told, with its cause, and is never a reason to touch the run."""
WAITS = 3
"""Rows after the first sign before a cause is named: what comes next tells one cause from another."""
VAGUE, LONGER = 0.4, 12
"""When the surest cause is no surer than this, rows to wait for more."""
OUTGROWN = 3.0
"""How many times larger than usual, for its rate, an update is worth remembering."""
MOMENTS = 64
"""Rows of a case that are kept: so many in all, the first ones and the last ones."""
ENDS = 60
"""Rows without a further sign after which a case is closed."""


class Judge:
    """Runs the detectors over each row, names causes, and decides within the policy's limits.

    The same rows give the same decisions on every process: nothing that is measured on one of them alone, such as
    times and memory, is a reason to act.
    """

    def __init__(
        self,
        policy: Policy,
        names: Sequence[str] = (),
        *,
        kinds: Sequence[str] = (),
        owned: int | None = None,
        adaptive: bool = True,
    ) -> None:
        self.policy = policy
        self.names = names
        """Of the tensors, in the order of the rows of `layers`; the first `owned` of them are held by an optimizer.
        `kinds` are the classes of the modules that hold them; `adaptive` optimizers divide by past gradients."""
        self.proven = -1
        """States taken at this attempt or before it are known to be good by the steps that followed."""
        self._adaptive = adaptive
        roles = [role_of(name, kind) for name, kind in zip_longest(names, kinds[: len(names)], fillvalue="")]
        self._heads = [k for k, role in enumerate(roles) if role is Role.ATTENTION]
        self._normed = any(kind.startswith(("BatchNorm", "SyncBatchNorm")) for kind in kinds)
        self.normal = Normal(policy.sight)
        self._past = LayerPast()
        self._units = Units(self.normal, self._past)
        self._outright: Sequence[NonFinite | Outlandish] = (NonFinite(), Outlandish())
        self.detectors: Sequence[Detector] = (
            self._units,
            Settings(self.normal),
            LossScale(policy.sight),
            Still(names, owned, self.normal, adaptive=adaptive),
            Jump(self.normal),
            Level(self.normal, self._units),
            Growth(self.normal),
            Oscillation(self.normal),
            Exploding(self._past, names, policy.sight),
            Vanishing(self._past, names, policy.sight),
            Dead(self._past, names, policy.sight),
            Rhythm(self.normal),
            Repeats(policy.sight),
            Start(policy.sight),
            Plateau(self.normal),
            Clipping(policy.sight),
            Pace(policy.sight),
            MemoryCreep(policy.sight),
            Bottleneck(),
        )
        self._treatment = Treatment(policy, self.normal)
        self._case: Case | None = None
        self._quiet_rows = 0
        self._refused = 0
        self._overflows = 0
        self._attempt = -1
        self._awaits = False
        """A rewind was decided and is still to come: what happens until then is of no account."""
        self._update = math.nan
        """The usual size of an update at a rate of one."""
        self._outgrown = (-1, 1.0)
        """The attempt after which updates were last found larger than usual, and how many times."""

    @property
    def quiet(self) -> bool:
        """Nothing is amiss, so that a state may be taken now."""
        return self._case is None and self._refused == 0

    def rewound(self, attempt: int, step: int) -> None:
        """The run went back to the state it had after this attempt."""
        self.normal.rewound(attempt)
        for detector in self.detectors:
            detector.rewound()
        self.proven = min(self.proven, attempt)
        self._case, self._overflows, self._awaits = None, 0, False  # refusals are counted until an update lands

    def failed(self, decision: Decision, why: str) -> None:
        """What was decided could not be done; the next rung is tried at the next sign of trouble."""
        self._treatment.failed()
        self._awaits = False

    # -- one row

    def update(self, row: Row, layers: np.ndarray | None = None) -> list[Event]:
        """Findings first, then what they mean, then what is decided."""
        self._count(row)
        if layers is not None and row.optimizer == 0:
            healthy = row.landed and (self._case is None or self._quiet_rows > ENDS // 2)
            self._past.take(row, layers, learn=healthy)
        found = [f for d in self._outright for f in d.update(row)]
        found += [f for d in self.detectors for f in d.update(row, layers)]
        refused = row.verdict in (Verdict.NONFINITE, Verdict.OUTLANDISH)
        silent = refused and self._refused > TALK and self._refused & (self._refused - 1)
        events: list[Event] = [] if silent else [*found]
        events += self._aside(row, [f for f in found if f.detector in ASIDE])
        self._follow(row, layers, [f for f in found if f.detector not in ASIDE])
        if refused and not silent:
            reason = "; ".join(f.detail for f in found if f.detector in ("nonfinite", "outlandish"))
            events.append(self._decision(row, Action.REFUSE, reason))
        events += self._named(row)
        events += self._decided(row, events)
        self.normal.take(row)
        self._prove(row)
        return events

    def _count(self, row: Row) -> None:
        if row.verdict is Verdict.LANDED:
            self._refused = self._overflows = 0
        if row.attempt != self._attempt:  # an update counts once, however many optimizers took part in it
            self._refused += row.verdict in (Verdict.NONFINITE, Verdict.OUTLANDISH)
            self._overflows += row.verdict is Verdict.OVERFLOW
            self._attempt = row.attempt

    def _prove(self, row: Row) -> None:
        if self._case is None and row.landed:
            self.proven = max(self.proven, row.attempt - self.policy.proof)

    # -- the case

    def _follow(self, row: Row, layers: np.ndarray | None, found: Sequence[Finding]) -> None:
        """Open a case at the first sign, add to it, and close it when all has been quiet for long."""
        if self._case is None and found:
            self._case = Case(
                onset=row.attempt,
                start=self.normal.start,
                normal=self.normal.loss.middle,
                attention=bool(self._heads),
                normed=self._normed,
                samples=self.normal.samples,
                adaptive=self._adaptive,
            )
            self._quiet_rows = 0
        case = self._case
        self._look_at_updates(row, case)
        if case is None:
            return
        if case.onset - 2 * WAITS <= self._outgrown[0] <= case.onset:  # before the first sign, not because of it
            case.update = self._outgrown[1]
        if not case.rates or any(f.detector == "settings" for f in found):
            rates, momenta = self.normal.settings
            case.rates, case.momenta = least(case.rates, rates), least(case.momenta, momenta)
        case.findings += found
        if row.optimizer == 0:
            case.moments.append(self._moment(row, layers))
            del case.moments[MOMENTS // 2 : -MOMENTS // 2]
        calm = not found and row.landed and not self.normal.z(row.loss) > self.policy.sight.raised
        self._quiet_rows = self._quiet_rows + 1 if calm else 0
        if self._quiet_rows >= ENDS:
            self._case = None

    def _moment(self, row: Row, layers: np.ndarray | None) -> Moment:
        apart, lead, bad, attended = math.nan, math.nan, 0.0, 0.0
        if layers is not None:
            apart, lead, bad = compared(self._past.usual, layers[:, NORM], layers[:, NONFINITE])
            attended = self._attended(layers)
        normal = self.normal
        return Moment(
            row=row,
            z=normal.z(row.loss),
            norm_ratio=normal.norm_ratio(row),
            rate_ratio=normal.rate_ratio(row),
            factor=self._units.factor,
            apart=apart,
            lead=lead,
            bad=bad,
            attended=attended,
        )

    def _attended(self, layers: np.ndarray) -> float:
        """How much more attention's gradients have grown than all others, as a logarithm."""
        mine = np.zeros(len(layers), dtype=bool)
        mine[[k for k in self._heads if k < len(mine)]] = True
        fit = (layers[:, NORM] > 0) & np.isfinite(layers[:, NORM]) & np.isfinite(self._past.usual)
        if not (mine & fit).any() or not (~mine & fit).any():
            return 0.0
        ratios = np.log(np.where(fit, layers[:, NORM], 1.0).astype(np.float64)) - self._past.usual
        return float(np.median(ratios[mine & fit]) - np.median(ratios[~mine & fit]))

    def _look_at_updates(self, row: Row, case: Case | None) -> None:
        """How large the update of the attempt before was for its rate, against what is usual."""
        if not row.update_ratio > 0 or not row.lr > 0:
            return
        size = row.update_ratio / row.lr
        if math.isnan(self._update):
            self._update = size
        elif size > OUTGROWN * self._update:
            self._outgrown = (row.attempt, size / self._update)
        elif case is None:
            self._update += (size - self._update) / 4

    def _named(self, row: Row) -> list[Event]:
        """The cause, once enough is known to tell it."""
        case = self._case
        if case is None or case.named or not case.findings:
            return []
        if not case.moments:
            return []
        vague = causes(case)[0][1] < VAGUE
        if len(case.moments) <= (LONGER if vague else WAITS) and not self._grave(case):
            return []
        case.named = True
        return self._diagnoses(row, case)

    def _grave(self, case: Case) -> str:
        return grave(case, adaptive=self._adaptive, clipped=bool(self._treatment.restraint.clip))

    def _diagnoses(self, row: Row, case: Case) -> list[Event]:
        ranked = causes(case)
        path = walk(
            Facts(
                step=row.step,
                mixed_precision=not math.isnan(row.loss_scale),
                scaled=not math.isnan(row.loss_scale),
                large_gradients=case.first.norm_ratio > math.log(self.policy.sight.jump),
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

    def _aside(self, row: Row, found: Sequence[Finding]) -> list[Event]:
        """What is told with its cause and is no reason to act."""
        telling = [f for f in found if f.detector not in ("clipping", "rhythm")]
        if not telling or self._case is not None:
            return []
        case = Case(onset=row.attempt, start=self.normal.start, normal=self.normal.loss.middle, findings=list(telling))
        case.moments.append(self._moment(row, None))
        return self._diagnoses(row, case)

    # -- what is done

    def _decided(self, row: Row, events: Sequence[Event]) -> list[Event]:
        if self._awaits:
            return []
        if self._refused == self.policy.limit or (self._refused > self.policy.limit and not self.policy.observe):
            return [self._decision(row, Action.STOP, self._why_refused(row, events))]
        if row.verdict is Verdict.OUTLANDISH:
            self._treatment.refused()
        case = self._case
        why = self._grave(case) if case is not None and case.moments else ""
        if case is not None and why and not (self.policy.observe and case.treated):
            case.treated = True
            accepted = self._treatment.accept(row, self._refused)
            if accepted:
                self._case = None
                return accepted
            cause = next((c for c, _, _ in causes(case)), Cause.UNKNOWN)
            decided = self._treatment.act(row, case, cause, why)
            self._awaits = not self.policy.observe and any(
                isinstance(d, Decision) and d.action is Action.REWIND for d in decided
            )
            case.findings = [f for f in case.findings if not f.grave and f.detector not in SPENT]
            return decided
        if self._overflows == self.policy.overflow_limit:
            return [self._decision(row, Action.STOP, self._why_overflows(row))]
        return self._treatment.watch(row, trouble=case is not None and self._quiet_rows == 0)

    def _why_refused(self, row: Row, found: Sequence[Event]) -> str:
        last = next((e.reason for e in found if isinstance(e, Decision)), "")
        if row.bad_weights > 0:
            way_out = "The weights themselves are damaged: go back to a checkpoint from before."
        elif row.verdict is Verdict.OUTLANDISH:
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

    def _why_overflows(self, row: Row) -> str:
        return (
            f"the loss scale overflowed {self._overflows} times in a row (it is now {row.loss_scale:.3g}), so no "
            "update has landed: the gradients themselves are not finite. Use bfloat16 or float32, or look at the "
            "batches since then."
        )

    def _decision(self, row: Row, action: Action, reason: str) -> Decision:
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
            "update": self._update,
            "outgrown": list(self._outgrown),
            "normal": self.normal.state_dict(),
            "past": self._past.state_dict(),
            "treatment": self._treatment.state_dict(),
            "detectors": [d.state_dict() for d in self.detectors],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._refused, self._overflows, self._attempt = state["refused"], state["overflows"], state["attempt"]
        self.proven, self._update = state["proven"], state["update"]
        self.normal.load_state_dict(state["normal"])
        self._past.load_state_dict(state["past"])
        self._treatment.load_state_dict(state["treatment"])
        for detector, held in zip(self.detectors, state["detectors"], strict=True):
            detector.load_state_dict(held)
        attempt, times = state["outgrown"]
        self._outgrown = (attempt, times)
        self._case, self._awaits = None, False  # what was seen of a trouble is not kept: if it is still there, it shows


SPENT = frozenset({"level", "growth", "oscillation", "vanishing", "dead", "units"})
"""Signs that a decision has answered; should they come again, they are told again."""


def _pattern(findings: Sequence[Finding]) -> Pattern:
    return next((f.pattern for f in findings if f.pattern is not Pattern.NONE), Pattern.NONE)
