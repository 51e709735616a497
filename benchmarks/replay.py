"""`surefoot bench replay`: feeds recorded rows to a new judge and compares its decisions with the recorded ones."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.recorded_run import JudgeNotice, RecordedAttach, read_attaches
from surefoot.journal.strict_json import dumps
from surefoot.judge.judge import Judge
from surefoot.judge.multi_optimizer import AnyJudge
from surefoot.judge.policy import Policy
from surefoot.records import Action, Decision, StepMetrics, Verdict

MEASUREMENT_SETTINGS = ("weights_every", "system_every", "snapshot_every", "snapshot_time_share", "max_snapshots")
"""Policy settings that change what is measured and kept; a replay cannot show their effect."""
GATE_SETTINGS = ("max_norm_ratio", "warmup", "norm_max_decay")
"""Policy settings that the gate's norm rule depends on."""
NormHistory = tuple[float, float, int]
"""Recent maximum norm, maximum ever, number of norms counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionPair:
    """A recorded decision (`then`) beside its replayed counterpart (`now`); None where there was none."""

    then: Decision | None
    now: Decision | None
    hypothetical: bool = False
    """It follows a difference: the run would have taken another course, and its rows would be other ones."""

    @property
    def decision(self) -> Decision:
        decision = self.then or self.now
        assert decision is not None
        return decision

    @property
    def same(self) -> bool:
        return _serialized(self.then) == _serialized(self.now)

    @property
    def differing_fields(self) -> list[str]:
        if self.then is None or self.now is None:
            return []
        then, now = _compared(self.then), _compared(self.now)
        return [name for name in then if dumps(then[name]) != dumps(now[name])]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """The decisions of a replay beside the recorded ones."""

    path: Path
    policy: Policy
    """The replaying policy; that of the last attach where each had its own."""
    same_policy: bool
    """Whether the recorded run was judged by the same policy."""
    rows: int
    """Rows judged in the replay."""
    pairs: Sequence[DecisionPair]
    notes: Sequence[str]
    """What the recording lacks, as messages."""

    @property
    def recorded(self) -> list[Decision]:
        return [pair.then for pair in self.pairs if pair.then is not None]

    @property
    def replayed(self) -> list[Decision]:
        return [pair.now for pair in self.pairs if pair.now is not None]

    @property
    def differences(self) -> list[DecisionPair]:
        return [pair for pair in self.pairs if not pair.same]


def replay(run_dir: str | Path, policy: Policy | None = None) -> ReplayResult:
    """Judge a recorded run again, by its own policy or by another one; ValueError where it cannot be replayed."""
    attaches, notes = read_attaches(run_dir)
    pairs: list[DecisionPair] = []
    rows = without_layers = 0
    for attach in attaches:
        attach_replay = _AttachReplay(attach, policy or attach.policy)
        pairs += pair_decisions(attach.decisions, attach_replay.decisions())
        rows += attach_replay.rows
        without_layers += attach.rows_without_layers
    if without_layers:
        notes.append(
            f"the per-tensor numbers of {without_layers} updates are no longer on disk: "
            "decisions based on them may differ"
        )
    return ReplayResult(
        path=Path(run_dir),
        policy=policy or attaches[-1].policy,
        same_policy=all(judges_alike(attach.policy, policy or attach.policy) for attach in attaches),
        rows=rows,
        pairs=_mark_hypothetical(pairs),
        notes=notes,
    )


def judges_alike(a: Policy, b: Policy) -> bool:
    """Whether two policies agree in every setting that decisions depend on."""
    names = [f.name for f in fields(Policy) if f.name not in MEASUREMENT_SETTINGS]
    return all(getattr(a, name) == getattr(b, name) for name in names)


class _AttachReplay:
    """Judges the rows of one attach again."""

    def __init__(self, attach: RecordedAttach, policy: Policy) -> None:
        self.rows = 0
        self._attach = attach
        self._judge: AnyJudge = attach.judge(policy)
        self._decisions: list[Decision] = []
        self._stopped = False
        """The run was stopped, and no update has been applied since."""
        self._applied = {(d.attempt, d.action) for d in attach.decisions if d.applied}
        other_gate = any(getattr(policy, name) != getattr(attach.policy, name) for name in GATE_SETTINGS)
        self._gate = GateReplay(attach.policy, policy) if other_gate else None

    def decisions(self) -> list[Decision]:
        for recorded in self._attach.rows():
            for notice in recorded.notices:
                self._notify(notice)
            row = recorded.row if self._gate is None else self._gate(recorded.row)
            if not recorded.judged:
                continue
            self.rows += 1
            events = self._judge.update(row, recorded.layers)
            new = [e for e in events if isinstance(e, Decision) and not self._is_unrecorded_stop(e)]
            self._stopped = not row.applied and (self._stopped or any(d.action is Action.STOP for d in new))
            self._decisions += new
            if self._ends_run(new):
                break
        return self._decisions

    def _is_unrecorded_stop(self, decision: Decision) -> bool:
        """A loop that continues after a stop is stopped again at every update; not all of these are recorded."""
        repeated = self._stopped and decision.action is Action.STOP
        return repeated and (decision.attempt, decision.action) not in self._applied

    def _notify(self, notice: JudgeNotice) -> None:
        if notice.origin is not None:
            where = {name: notice.origin[name] for name in ("module", "kind", "inputs", "weights")}
            self._judge.located(StepMetrics(step=notice.step, attempt=notice.attempt, time=0.0), **where)
            return
        if notice.carried_out is not None or notice.dismissed is not None:
            self._notify_of_trial(notice)
            return
        if notice.failed_decision is None:
            self._judge.rewound(notice.attempt, notice.step)
            if self._gate is not None:
                self._gate.rewound(notice.attempt)
            return
        key = (notice.failed_decision.attempt, notice.failed_decision.action)
        decision = next((d for d in self._decisions if (d.attempt, d.action) == key), None)
        if decision is not None:
            self._judge.failed(decision, notice.why)

    def _notify_of_trial(self, notice: JudgeNotice) -> None:
        """What a trial made of a decision; the trial itself cannot be run again without the model."""
        if not isinstance(self._judge, Judge):
            return
        if notice.carried_out is not None:
            self._judge.carried_out(notice.carried_out, proposed=notice.proposed)
        if notice.dismissed is not None:
            self._judge.dismissed(notice.dismissed, proposed=notice.proposed)
        if notice.proposed and notice.carried_out is not None:
            self._decisions.append(notice.carried_out)

    def _ends_run(self, decisions: Iterable[Decision]) -> bool:
        """Whether the run would have been stopped here; a rewind that was not recorded counts as failed."""
        for decision in decisions:
            if not decision.applied or (decision.attempt, decision.action) in self._applied:
                continue
            if decision.action is Action.STOP:
                return True
            if decision.action is Action.REWIND:
                self._judge.failed(decision, "the recorded run was not rewound")
        return False


def pair_decisions(then: Sequence[Decision], now: Sequence[Decision]) -> Iterator[DecisionPair]:
    """Pair decisions with the same attempt and action, ordered by attempt."""
    sides = [dict(zip(_keys(side), side, strict=True)) for side in (then, now)]
    for key in sorted(dict.fromkeys(chain(*sides)), key=lambda key: key[0]):
        yield DecisionPair(then=sides[0].get(key), now=sides[1].get(key))


def _keys(decisions: Sequence[Decision]) -> Iterator[tuple[int, Action, int]]:
    """Attempt, action and a running number: each of several optimizers may have one."""
    count: Counter[tuple[int, Action]] = Counter()
    for d in decisions:
        yield d.attempt, d.action, count[d.attempt, d.action]
        count[d.attempt, d.action] += 1


def _mark_hypothetical(pairs: Sequence[DecisionPair]) -> list[DecisionPair]:
    first = next((pair.decision.attempt for pair in pairs if not pair.same), None)
    return [replace(p, hypothetical=first is not None and p.decision.attempt > first) for p in pairs]


def _serialized(decision: Decision | None) -> str:
    """Everything about a decision that must be the same in a replay, as the journal writes it."""
    return "" if decision is None else dumps(_compared(decision))


def _compared(decision: Decision) -> dict[str, Any]:
    """All fields but the reason: a journal of another version words it differently."""
    fields = decision.as_json()
    del fields["reason"]
    return fields


# -- the gate's verdicts under another policy


@dataclass(slots=True)
class ReplayedNormRule:
    """The gate's norm rule with the settings of one policy, for the rows of one optimizer."""

    policy: Policy
    norms: NormHistory = (0.0, 0.0, 0)
    _history: dict[int, NormHistory] = field(default_factory=dict)

    def limit(self) -> float:
        recent, ever, count = self.norms
        return max(recent * self.policy.max_norm_ratio, ever) if count >= self.policy.warmup else math.inf

    def record(self, row: StepMetrics, *, applied: bool) -> None:
        recent, ever, count = self.norms
        if applied and row.norm > 0:
            self.norms = max(recent * self.policy.norm_max_decay, row.norm), max(ever, row.norm), count + 1
        self._history[row.attempt] = self.norms

    def rewound(self, attempt: int) -> None:
        """Restore the history as of this attempt, as the gate's memory is rewound with the run."""
        self._history = {number: norms for number, norms in self._history.items() if number <= attempt}
        self.norms = next(reversed(self._history.values()), (0.0, 0.0, 0))


class GateReplay:
    """Gives rows the verdict of another policy, where the norm rule explains the recorded verdict.

    Updates refused for another reason, such as a norm ceiling set by an override, stay refused.
    """

    def __init__(self, then: Policy, now: Policy) -> None:
        self._policies = (then, now)
        self._rules: dict[int, tuple[ReplayedNormRule, ReplayedNormRule]] = {}

    def __call__(self, row: StepMetrics) -> StepMetrics:
        if row.optimizer not in self._rules:
            self._rules[row.optimizer] = ReplayedNormRule(self._policies[0]), ReplayedNormRule(self._policies[1])
        then, now = self._rules[row.optimizer]
        explained = row.verdict is _norm_verdict(row, then.limit())
        limit = now.limit()
        verdict = _norm_verdict(row, limit) if explained else row.verdict
        assert verdict is not None
        then.record(row, applied=row.applied)
        now.record(row, applied=verdict is Verdict.APPLIED)
        if verdict is row.verdict and verdict is not Verdict.NORM_OUTLIER:
            return row
        return replace(row, verdict=verdict, norm_limit=limit if explained and math.isfinite(limit) else row.norm_limit)

    def rewound(self, attempt: int) -> None:
        for rules in self._rules.values():
            for rule in rules:
                rule.rewound(attempt)


def _norm_verdict(row: StepMetrics, limit: float) -> Verdict | None:
    """The verdict of the norm rule; None for updates that were nonfinite or never reached it."""
    if row.verdict not in (Verdict.APPLIED, Verdict.NORM_OUTLIER):
        return None
    return Verdict.NORM_OUTLIER if row.norm > limit else Verdict.APPLIED
