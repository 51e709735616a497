"""From a named trouble to a decision: which rung is next, within budgets, and whether the last one helped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from surefoot.judge.diagnose.case import Case, least
from surefoot.judge.ladders import EARLY, LADDERS, LEFT_OVER, USUAL, Rung
from surefoot.judge.normal import Normal
from surefoot.judge.policy import Policy
from surefoot.records import Action, Cause, Decision, Event, Outcome, Restraint, Row, Verdict

FREE = Restraint()
DOUBT = {True: 3, False: 12}
"""Refusals in a row before a run goes back: soon when not even the loss is finite, for then it may be the weights; late
when the loss is sound, and refusing is all that is needed."""
WIDER = 1.5
"""By how much a cap or a clip that is still needed is widened at a time."""
MANY = 0.25
"""Share of the tensors that have fallen silent, above which little of a rise is needed to believe it."""
RAISED = 4.0
"""Deviations above normal at which a loss has risen beyond doubt."""
AT_ONCE = 5
"""Rows after the first sign within which all is multiplied, if it was a mistake and not a harder task."""
HEALS = 3
"""Rows in which a leap may heal by itself before anything is done about it."""
TAMPERED = 1.5
"""Factor of the norm of the weights that no training explains."""
HIGHER, GAINS = 4.0, 16
"""A rate so many times what it usually was, for so many rows, should have gained something by then."""
NEW = 6
"""Finite updates in a row that were refused: the weights are damaged or, after a rewind, this is the new normal."""


class Treatment:
    """Keeps the books of what was tried: rungs, failures in a row, what is still restrained, and for how long."""

    def __init__(self, policy: Policy, normal: Normal) -> None:
        self._policy = policy
        self._normal = normal
        self.restraint = self._former = FREE
        self.failures = 0
        """Actions in a row that did not help."""
        self.actions = 0
        self._rung = 0
        self._since = -1
        """Updates that landed since the last action; -1 when none is on trial."""
        self._calm = 0
        """Healthy updates since the last action or loosening."""
        self._patience = policy.loosen_after
        self._loosened = False
        """Something was loosened, and it is not yet known whether that was too early."""
        self._refusals = 0
        """Updates refused since the last action or loosening."""
        self._last: Decision | None = None
        self._before = math.nan
        """The usual loss when it was taken."""

    @property
    def on_trial(self) -> bool:
        return self._since >= 0

    def watch(self, row: Row, *, trouble: bool) -> list[Event]:
        """A row that calls for no action: did the last one help, and may restraints be loosened?"""
        if row.optimizer or not row.landed:
            return []
        self._calm = 0 if trouble else self._calm + 1
        if self._loosened and self._calm >= self._patience:
            self._loosened, self._patience = False, self._policy.loosen_after
        events: list[Event] = []
        if self.on_trial:
            self._since += 1
            if self._since >= self._policy.probation and not trouble:
                events.append(self._outcome(row, helped=True))
                self.failures = self._rung = 0
                self._since = -1
        patience = self._patience // 4 if self.restraint.rate < 1 else self._patience
        if self.restraint != FREE and self._calm >= patience and not self.on_trial:
            looser, words = self._looser(row), f"{self._calm} healthy updates: what was asked of the steps is loosened"
            self._calm = self._refusals = 0
            self._loosened = True
            if looser != self.restraint:
                self.restraint = looser
                events.append(self._decision(row, Action.LOOSEN, words, restraint=looser))
        return events

    def refused(self) -> None:
        """A finite update was refused, perhaps by a ceiling that is in force."""
        self._refusals += 1

    def _looser(self, row: Row) -> Restraint:
        """What has not been needed lately is dropped, and what is still needed is widened step by step."""
        held = self.restraint
        rate = row.lr if row.lr > 0 else 0.0
        cap = held.rate_cap
        if cap and rate > self._normal.sight.faster * cap[0]:
            pass  # the loop still asks for what did the harm
        elif cap and rate > cap[0]:
            cap = tuple(WIDER * c for c in cap)
        elif cap:
            cap = ()
        momentum = held.momentum_cap if held.momentum_cap and row.momentum > held.momentum_cap[0] else ()
        clip = tuple(WIDER * c for c in held.clip) if held.clip and row.norm > held.clip[0] / 2 else ()
        if held.rate < 1:  # one thing at a time: first what was lowered further than it ever was
            return replace(held, rate=min(1.0, 2 * held.rate), rewarm=0)
        return replace(
            held,
            rewarm=0,
            rate_cap=cap,
            momentum_cap=momentum,
            clip=clip,
            norm_ceiling=held.norm_ceiling if self._refusals else (),
            loss_ceiling=held.loss_ceiling if self._refusals else math.inf,
            float32=False,
            empty=held.empty and row.left_over > 0,
        )

    def accept(self, row: Row, refused: int) -> list[Event]:
        """A lasting, finite change that is still there after a rewind, on other batches, is the new normal."""
        ours = self.restraint.norm_ceiling or math.isfinite(self.restraint.loss_ceiling)
        if not ours or refused < NEW or row.verdict is not Verdict.OUTLANDISH:
            return []
        self.restraint = replace(self.restraint, norm_ceiling=(), loss_ceiling=math.inf)
        words = f"{refused} finite updates in a row stood out alike, after a rewind too: this is the new normal"
        return [self._decision(row, Action.ACCEPT, words, restraint=self.restraint)]

    def act(self, row: Row, case: Case, cause: Cause, reason: str) -> list[Event]:
        """The next rung, or the end."""
        events: list[Event] = []
        if self.on_trial:
            events.append(self._outcome(row, helped=False))
            self.failures += 1
            self._rung += 1
        if self._loosened:
            self._loosened, self._patience = False, 2 * self._patience
        early = any(f.evidence.get("early") for f in case.found("settings"))
        ladder = EARLY if early else LEFT_OVER if case.found("left_over") else LADDERS.get(cause, USUAL)
        spent = self.actions >= self._policy.actions
        if self.failures >= self._policy.failures or self._rung >= len(ladder) or spent:
            tried = f"{self.failures} attempts in a row did not help"
            tried = tried if self.failures else "nothing that is left to try can be done"
            tried = f"{self.actions} actions are enough" if spent else tried
            events.append(self._decision(row, Action.STOP, f"{reason}; {tried}", cause=cause, before=case.onset))
            return events
        rung = ladder[self._rung]
        asked = self._restraint(rung, case)
        self.actions += 1
        if not self._policy.observe:  # else nothing is in force, nor on trial
            self._former, self.restraint = self.restraint, asked
            self._since, self._calm, self._refusals, self._before = 0, 0, 0, self._normal.loss.middle
        decision = self._decision(
            row,
            Action.REWIND,
            reason,
            rung=rung.words,
            cause=cause,
            restraint=asked,
            before=0 if early else case.onset,
            reset=rung.reset,
        )
        return [*events, decision]

    def failed(self) -> None:
        """It could not be done: the next rung, at the next sign of trouble."""
        self._rung += 1
        self._since = -1
        self.restraint = self._former

    def _restraint(self, rung: Rung, case: Case) -> Restraint:
        normal = self._normal
        count = 1 + max(normal.norms, default=-1)
        tops = [normal.norms[k].top if k in normal.norms else math.inf for k in range(count)]
        middles = [normal.norms[k].middle if k in normal.norms else math.inf for k in range(count)]
        if middles and len(normal.applied):
            middles[0] = min(middles[0], normal.applied.middle)  # the loop itself used to clip
        loss = normal.loss
        room = max(self._policy.ceiling * (loss.top - loss.middle), 10 * loss.spread)
        return Restraint(
            rate=rung.rate,
            rewarm=rung.rewarm,
            rate_cap=least(case.rates, self.restraint.rate_cap) if rung.hold else (),
            momentum_cap=least(case.momenta, self.restraint.momentum_cap) if rung.hold else (),
            clip=tuple(_exp(m) for m in middles) if rung.clip else (),
            norm_ceiling=tuple(self._policy.ceiling * _exp(t) for t in tops) if rung.ceilings and not rung.clip else (),
            loss_ceiling=loss.top + room if rung.ceilings and normal.formed else math.inf,
            float32=rung.float32,
            empty=rung.empty,
        )

    def _outcome(self, row: Row, *, helped: bool) -> Outcome:
        last = self._last
        action = Action.REWIND if last is None else last.action
        now = self._normal.recent[-1] if self._normal.recent else row.loss
        did = "it helped" if helped else "it did not help"
        detail = f"{did}: the loss is {now:.4g}, it was {self._before:.4g} before the trouble"
        values: dict[str, Any] = {"loss": now, "before": self._before, "updates": self._since}
        where: dict[str, Any] = {"step": row.step, "attempt": row.attempt, "time": row.time}
        return Outcome(**where, action=action, helped=helped, detail=detail, values=values)

    def _decision(self, row: Row, action: Action, reason: str, **more: Any) -> Decision:
        where: dict[str, Any] = {"step": row.step, "attempt": row.attempt, "time": row.time}
        decision = Decision(**where, action=action, reason=reason, applied=not self._policy.observe, **more)
        self._last = decision
        return decision

    def state_dict(self) -> dict[str, Any]:
        return {
            "restraint": self.restraint.as_json(),
            "failures": self.failures,
            "actions": self.actions,
            "rung": self._rung,
            "since": self._since,
            "calm": self._calm,
            "patience": self._patience,
            "loosened": self._loosened,
            "refusals": self._refusals,
            "before": self._before,
            "last": None if self._last is None else self._last.action.value,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        held: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in state["restraint"].items()}
        self.restraint = self._former = Restraint(**held)
        self.failures, self.actions, self._rung = state["failures"], state["actions"], state["rung"]
        self._since, self._calm, self._patience = state["since"], state["calm"], state["patience"]
        self._before, self._refusals, self._loosened = state["before"], state["refusals"], state["loosened"]
        last = state["last"]
        self._last = None if last is None else Decision(step=0, attempt=0, action=Action(last), reason="")


def grave(case: Case, *, adaptive: bool, clipped: bool) -> str:
    """Why something must be done about this, in words; nothing when telling is enough."""
    return next((why for rule in GRAVE if (why := rule(case, adaptive or clipped))), "")


def _told(case: Case, bears: bool) -> str:
    """A detector is sure of it."""
    in_units = case.found("units") and (bears or _compensated(case))  # the loss is told in another unit, no more
    young = len(case.moments) <= HEALS
    aside = {"level": in_units, "jump": young}
    return next((f.detail for f in case.findings if f.grave and not aside.get(f.detector, False)), "")


def _multiplied(case: Case, bears: bool) -> str:
    """Updates have grown with the gradients: at once, and not because the data is another."""
    units = [f for f in case.found("units") if f.attempt <= case.onset + AT_ONCE]
    harder = any(m.strange >= 1 for m in case.moments)
    return units[0].detail if units and not bears and not harder and not _compensated(case) else ""


def _compensated(case: Case) -> bool:
    """The rate was lowered by as much as the loss was multiplied."""
    return case.found("units")[0].evidence["factor"] * case.last.rate_ratio < 3


def _set_wrong(case: Case, bears: bool) -> str:
    """Rate or momentum were raised, and the run suffers from it."""
    raised = [f for f in case.found("settings") if "times" in f.evidence or "momentum" in f.evidence]
    if any(f.evidence.get("momentum", 0) >= 1 for f in raised):
        return raised[0].detail
    suffers = case.found("level", "growth", "oscillation")
    if raised and suffers:
        return f"{raised[0].detail}, and {suffers[0].detail}"
    return f"{raised[0].detail}, and nothing is gained by it" if raised and _gains_nothing(case) else ""


def _gains_nothing(case: Case) -> bool:
    """For long the rate has been far higher than it was, and the loss is no lower."""
    lately = [m.row.loss for m in case.moments[-GAINS:] if m.rate_ratio > 1 / HIGHER]
    return len(lately) == GAINS and case.last.rate_ratio > HIGHER and sum(lately) / GAINS >= case.normal


def _tampered(case: Case, bears: bool) -> str:
    """Something else than the optimizer has written to the weights, and the loss has risen."""
    if not abs(case.weights) > math.log(TAMPERED) or not case.found("level", "jump") or not _high(case, 1.0):
        return ""
    times = math.exp(min(case.weights, 700.0))
    return f"the norm of the weights is {times:.3g} times what it was, which no update explains, and the loss has risen"


def _piled_up(case: Case, bears: bool) -> str:
    """Gradients are left over, and have grown beyond what they were."""
    left = case.found("left_over")
    grown = sum(m.norm_ratio > 0 for m in case.moments[-3:]) >= 2
    return left[0].detail if left and (grown or case.found("level", "growth", "jump", "oscillation")) else ""


def _unclipped(case: Case, bears: bool) -> str:
    """A run that lived by its clipping has lost it, and suffers."""
    lost = [f for f in case.found("lost_clip") if f.evidence["times"] > 1]
    suffers = case.found("level", "growth", "jump", "oscillation")
    return f"{lost[0].detail}, and {suffers[0].detail}" if lost and suffers else ""


def _silent(case: Case, bears: bool) -> str:
    """Gradients no longer come through, and the loss has risen."""
    silent, level = case.found("vanishing", "dead"), case.found("level")
    if not silent or not level:
        return ""
    many = max(f.evidence["share"] for f in silent) > MANY
    return f"{silent[0].detail}, and {level[0].detail}" if _high(case, 1.0 if many else RAISED) else ""


def _outgrown(case: Case, bears: bool) -> str:
    """An update was too large for its rate, and the loss has risen since."""
    level = case.found("level")
    if not level or not case.update > 1 or not _high(case, RAISED):
        return ""
    return f"an update was {case.update:.3g} times larger than usual at the same rate, and {level[0].detail}"


def _high(case: Case, deviations: float) -> bool:
    """Most of the last losses lie so far above normal: a rise that was told may be over by now."""
    return sum(moment.z > deviations for moment in case.moments[-5:]) >= 3


def _refused(case: Case, bears: bool) -> str:
    """One refusal after the other."""
    last = case.last.row
    sound = math.isfinite(last.loss) or last.rank >= 0
    most = NEW if last.verdict is Verdict.OUTLANDISH else DOUBT[not sound]
    return f"{case.refused} updates in a row were refused: {_last(case.findings)}" if case.refused >= most else ""


GRAVE = (_piled_up, _unclipped, _told, _multiplied, _set_wrong, _tampered, _silent, _outgrown, _refused)
"""What calls for an action, each with its reason in words; `bears` when the run does not mind larger gradients."""


def _last(findings: Sequence[Any]) -> str:
    return findings[-1].detail if findings else ""


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))
