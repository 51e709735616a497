"""From a named trouble to a decision: which rung is next, within budgets, and whether the last one helped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from surefoot.journal.aliases import ACTIONS, OVERRIDES, renamed
from surefoot.judge.baselines import Baselines
from surefoot.judge.incident import Incident, least
from surefoot.judge.policy import AGAIN, CLEARLY, HUGE, WHILE, Policy
from surefoot.judge.remedies import ASTRAY, EARLY, HELD, HOLD, LADDERS, LEFT_OVER, LOW_SCALE, REPLICAS, USUAL, Remedy
from surefoot.judge.severity import in_units_at_once, only_raised
from surefoot.records import Action, Cause, Decision, Event, Outcome, StepMetrics, StepOverrides, Verdict

FREE = StepOverrides()


class Remediation:
    """Keeps the books of what was tried: rungs, failures in a row, what is still restrained, and for how long."""

    def __init__(self, policy: Policy, normal: Baselines) -> None:
        self._policy = policy
        self._normal = normal
        self.restraint = self._former = FREE
        self.failures = 0
        """Actions in a row that did not help."""
        self.actions = 0
        self._tried: list[str] = []
        """Rungs that did not help, in words, since one did or there was progress."""
        self._cannot: list[str] = []
        """Those that could not be done, since one helped."""
        self._since = -1
        """Updates that landed since the last action; -1 when none is on trial."""
        self._calm = 0
        """Healthy updates since the last action or loosening."""
        self._patience = policy.relax_after
        self._loosened = False
        """Something was loosened, and it is not yet known whether that was too early."""
        self._refusals = 0
        """Updates refused since the last action or loosening."""
        self._waits = False
        """The ceilings in force are there to wait something out."""
        self._last: Decision | None = None
        """The rung that was tried last."""
        self._before = math.nan
        """The usual loss when it was taken."""

    @property
    def on_trial(self) -> bool:
        return self._since >= 0

    def watch(self, row: StepMetrics, *, trouble: bool) -> list[Event]:
        """A row that calls for no action: did the last one help, and may restraints be loosened?"""
        if row.optimizer or not row.applied:
            return []
        self._calm = 0 if trouble else self._calm + 1
        if self._loosened and self._calm >= self._patience:
            self._loosened, self._patience = False, self._policy.relax_after
        events: list[Event] = []
        if self.on_trial:
            self._since += 1
            if self._since >= self._policy.healthy_steps_to_confirm and not trouble:
                helped = not self._still_high()
                events.append(self._outcome(row, helped=helped))
                if helped:
                    self.failures, self._tried, self._cannot = 0, [], []
                else:  # nothing more is asked for, but at the next sign this is not tried again
                    self._tried.append(self._rung)
                self._since = -1
        if self._calm >= self._policy.relax_after and not self.on_trial:
            self.failures, self._tried = 0, []  # that is progress, whatever it was that helped
        patience = self._patience // 4 if self.restraint.lr_factor < 1 else self._patience
        if self.restraint != FREE and self._calm >= patience and not self.on_trial:
            looser, words = self._looser(row), f"{self._calm} healthy updates: what was asked of the steps is loosened"
            self._calm = self._refusals = 0
            self._loosened = True
            if looser != self.restraint:
                self.restraint = looser
                events.append(self._decision(row, Action.RELAX, words, overrides=looser))
        return events

    def _still_high(self) -> bool:
        """The last losses are no longer what they were before the trouble."""
        recent = sorted(self._normal.recent)
        return bool(recent) and self._normal.z(recent[len(recent) // 2]) > self._normal.raised

    def holds(self, row: StepMetrics) -> bool:
        """This update was refused on purpose, to wait something out."""
        return self._waits and row.verdict is Verdict.NORM_OUTLIER and self.restraint.norm_ceiling != ()

    def refused(self) -> None:
        """A finite update was refused, perhaps by a ceiling that is in force."""
        self._refusals += 1

    def _looser(self, row: StepMetrics) -> StepOverrides:
        """What has not been needed lately is dropped, and what is still needed is widened step by step."""
        held = self.restraint
        rate = row.lr if row.lr > 0 else 0.0
        cap = held.max_lr
        if cap and rate > self._normal.sight.faster * cap[0]:
            pass  # the loop still asks for what did the harm
        elif cap and rate > cap[0]:
            cap = tuple(CLEARLY * c for c in cap)
        elif cap:
            cap = ()
        momentum = held.max_momentum if held.max_momentum and row.momentum > held.max_momentum[0] else ()
        clip = tuple(CLEARLY * c for c in held.clip) if held.clip and row.norm > held.clip[0] / 2 else ()
        if held.lr_factor < 1:  # one thing at a time: first what was lowered further than it ever was
            return replace(held, lr_factor=min(1.0, 2 * held.lr_factor), rewarmup_steps=0)
        return replace(
            held,
            rewarmup_steps=0,
            max_lr=cap,
            max_momentum=momentum,
            clip=clip,
            norm_ceiling=held.norm_ceiling if self._refusals else (),
            loss_ceiling=held.loss_ceiling if self._refusals else math.inf,
            float32=False,
            zero_stale_grads=held.zero_stale_grads and row.stale_grads > 0,
        )

    def accept(self, row: StepMetrics, refused: int) -> list[Event]:
        """A lasting, finite change that is still there after a rewind, on other batches, is the new normal."""
        ours = self.restraint.norm_ceiling or math.isfinite(self.restraint.loss_ceiling)
        if not ours or refused < 2 * AGAIN or row.verdict is not Verdict.NORM_OUTLIER:
            return []
        self.restraint = replace(self.restraint, norm_ceiling=(), loss_ceiling=math.inf)
        words = f"{refused} finite updates in a row stood out alike, after a rewind too: this is the new normal"
        return [self._decision(row, Action.ACCEPT, words, overrides=self.restraint)]

    def act(self, row: StepMetrics, case: Incident, cause: Cause, reason: str) -> list[Event]:
        """The next rung, or the end."""
        events: list[Event] = []
        held = self.on_trial and self._rung == HOLD.words
        if self.on_trial:
            events.append(self._outcome(row, helped=False))
            self.failures += 1
            self._tried.append(self._rung)
        if self._loosened:
            self._loosened, self._patience = False, 2 * self._patience
        early = not _apart(case) and any(f.evidence.get("early") for f in case.found("settings"))
        ladder = _ladder(case, cause, early=early, held=held)
        spent = self.actions >= self._policy.max_actions
        tried = [] if ladder is REPLICAS else self._tried  # another fault of that kind has the same answer
        rung = next((r for r in ladder if r.words not in (*tried, *self._cannot)), None)
        if self.failures >= self._policy.max_failed_actions or rung is None or spent:
            why = f"{self.failures} attempts in a row did not help"
            why = why if self.failures else "nothing that is left to try can be done"
            why = f"{self.actions} actions are enough" if spent else why
            events.append(self._decision(row, Action.STOP, f"{reason}; {why}", cause=cause, max_attempt=case.onset))
            return events
        asked = self.restraint if rung.rescale or rung.keep else self._restraint(rung, case)
        self.actions += 1
        if not self._policy.observe:  # else nothing is in force, nor on trial
            self._waits = self._waits if rung.keep else rung.strict
            self._former, self.restraint = self.restraint, asked
            self._since, self._calm, self._refusals, self._before = 0, 0, 0, self._normal.loss.middle
        decision = self._decision(
            row,
            Action.REWIND if rung.back else Action.CONSTRAIN,
            reason,
            remedy=rung.words,
            cause=cause,
            overrides=asked,
            max_attempt=0 if early else _sound_before(case),
            onset_known=not early and not self._tried and _dated(case),
            reset_optimizer=rung.reset,
            loss_scale=_usual_scale(case) if rung.rescale else 0.0,
        )
        self._last = decision
        return [*events, decision]

    def failed(self) -> None:
        """It could not be done: the next rung, at the next sign of trouble."""
        self._cannot.append(self._rung)
        self._since = -1
        self.restraint = self._former

    @property
    def _rung(self) -> str:
        """What was tried last, in words."""
        return "" if self._last is None else self._last.remedy

    def _restraint(self, rung: Remedy, case: Incident) -> StepOverrides:
        normal, before = self._normal, _sound_before(case)
        count = 1 + max(normal.norms, default=-1)
        norms = [normal.norms[k].before(before) if k in normal.norms else None for k in range(count)]
        tops = [math.inf if known is None else known.top for known in norms]
        middles = [math.inf if known is None else known.middle for known in norms]
        if middles and len(normal.applied):
            middles[0] = min(middles[0], normal.applied.middle)  # the loop itself used to clip
        loss, above = (
            normal.loss.before(before),
            self._policy.tight_ceiling if rung.strict else self._policy.norm_ceiling,
        )
        room = above * (loss.top - loss.middle)
        room = room if rung.strict else max(room, HUGE * loss.spread)
        return StepOverrides(
            lr_factor=rung.rate,
            rewarmup_steps=rung.rewarm,
            max_lr=least(_sound_rates(case), self.restraint.max_lr) if rung.hold else (),
            max_momentum=least(case.momenta, self.restraint.max_momentum) if rung.hold else (),
            clip=tuple(_exp(m) for m in middles) if rung.clip else (),
            norm_ceiling=tuple(above * _exp(t) for t in tops) if rung.ceilings and not rung.clip else (),
            loss_ceiling=loss.top + room if rung.ceilings and normal.bounds_loss else math.inf,
            float32=rung.float32,
            zero_stale_grads=rung.empty,
        )

    def _outcome(self, row: StepMetrics, *, helped: bool) -> Outcome:
        last = self._last
        action = Action.REWIND if last is None else last.action
        now = self._normal.recent[-1] if self._normal.recent else row.loss
        did = "it helped" if helped else "it did not help"
        what = "loss" if self._normal.judges_loss else "progress"
        known = f": the {what} is {now:.4g}, it was {self._before:.4g} before the trouble"
        detail = did if math.isnan(now) and math.isnan(self._before) else f"{did}{known}"
        values: dict[str, Any] = {"loss": now, "before": self._before, "updates": self._since}
        where: dict[str, Any] = {"step": row.step, "attempt": row.attempt, "time": row.time}
        return Outcome(**where, action=action, helped=helped, detail=detail, values=values)

    def _decision(self, row: StepMetrics, action: Action, reason: str, **more: Any) -> Decision:
        where: dict[str, Any] = {"step": row.step, "attempt": row.attempt, "time": row.time}
        return Decision(**where, action=action, reason=reason, applied=not self._policy.observe, **more)

    def state_dict(self) -> dict[str, Any]:
        return {
            "restraint": self.restraint.as_json(),
            "failures": self.failures,
            "actions": self.actions,
            "tried": list(self._tried),
            "cannot": list(self._cannot),
            "since": self._since,
            "calm": self._calm,
            "patience": self._patience,
            "loosened": self._loosened,
            "refusals": self._refusals,
            "waits": self._waits,
            "before": self._before,
            "last": None if self._last is None else [self._last.action.value, self._last.remedy],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        held: dict[str, Any] = {
            n: tuple(v) if isinstance(v, list) else v for n, v in renamed(state["restraint"], OVERRIDES).items()
        }
        self.restraint = self._former = StepOverrides(**held)
        self.failures, self.actions = state["failures"], state["actions"]
        self._tried, self._cannot = list(state.get("tried", [])), list(state.get("cannot", []))
        self._since, self._calm, self._patience = state["since"], state["calm"], state["patience"]
        self._before, self._refusals, self._loosened = state["before"], state["refusals"], state["loosened"]
        last, self._waits = state["last"], state.get("waits", False)
        action, rung = last if isinstance(last, list) else (last, "")  # a checkpoint may be older
        self._last = (
            None
            if last is None
            else Decision(step=0, attempt=0, action=Action(ACTIONS.get(action, action)), reason="", remedy=rung)
        )


def _ladder(case: Incident, cause: Cause, *, early: bool, held: bool) -> Sequence[Remedy]:
    """What was found may speak for a ladder of its own, whatever the cause."""
    if _apart(case):
        return REPLICAS
    if early:
        return EARLY
    if case.found("stale_grads"):
        return LEFT_OVER
    if _usual_scale(case):
        return LOW_SCALE
    if any(not f.evidence["raised"] for f in case.found("astray")):
        return ASTRAY
    return HELD if held or only_raised(case) else LADDERS.get(cause, USUAL)


def _sound_before(case: Incident) -> int:
    """States from before this attempt are sound: the first sign, or a little earlier when held-out data told of it
    late, for the first sign may have been late too."""
    for told in case.found("astray"):
        since = told.evidence["well"]  # a rate may have been raised right after that
        return min(case.onset, since if told.evidence["raised"] else max(since, case.onset - WHILE))
    return case.onset


def _apart(case: Incident) -> bool:
    """The ranks hold different weights, and are to be made equal."""
    return any(f.severe for f in case.found("replicas"))


def _dated(case: Incident) -> bool:
    """It is known with which update this began, and that until then nothing was wrong: what came from outside was."""
    if _apart(case) and case.onset == case.found("replicas")[-1].evidence["well"]:
        return True
    told = case.found("lost_clip") or in_units_at_once(case)
    landed = any(m.row.applied for m in case.moments)
    return not case.found("astray") and (bool(told) or not landed or case.first.strange >= 1)


def _sound_rates(case: Incident) -> Sequence[float]:
    """The rates when things were well; held-out data knows best when that was."""
    told = [f.evidence["rate"] for f in case.found("astray")]
    return least(case.rates, told[:1])


def _usual_scale(case: Incident) -> float:
    """The loss scale before it fell too low; 0 when it did not."""
    return next((float(f.evidence["usual"]) for f in case.found("loss_scale") if f.severe), 0.0)


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))
