"""One judge per group of optimizers that step together: what is normal for a critic is not for its generator.

Optimizers that step on one backward share a loss and are judged as one. Those that step in turn have a loss, gradients
and weights of their own; a separate judge sees only their rows, as if they were a run by themselves. A decision about
one group names its optimizers; a rewind concerns all.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from surefoot.judge.judge import Judge
from surefoot.judge.policy import Policy
from surefoot.judge.thresholds import BASELINE_ROWS, REPEAT_COUNT
from surefoot.records import Action, Decision, Diagnosis, Event, Finding, Outcome, StepMetrics, StepOverrides

Scope = tuple[int, int]
"""The first tensor of an optimizer, and the one after its last."""
KEPT_ATTEMPTS = 16 * BASELINE_ROWS
"""Attempts of a group whose number in the run is remembered."""
ACTIVE_ATTEMPTS = 4 * BASELINE_ROWS
"""Attempts of the run after which a group that did not step no longer counts."""
NO_OVERRIDES = StepOverrides()


class OptimizerGroup:
    """Optimizers judged as one. Their judge numbers its rows by itself: `local` attempts, as opposed to the run's."""

    def __init__(self, members: tuple[int, ...], judge: Judge, tensors: np.ndarray, label: str) -> None:
        self.members, self.judge = members, judge
        self.tensors = tensors
        """Indices of their tensors among all."""
        self._label = label
        self._attempts: list[int] = []
        """The run's numbers of the last local attempts."""
        self._first_local = 0
        """The local number of the first of them."""

    @property
    def latest(self) -> int:
        """The last attempt of the run that was theirs; -1 before the first."""
        return self._attempts[-1] if self._attempts else -1

    def update(self, row: StepMetrics, layers: np.ndarray | None) -> list[Event]:
        if row.attempt != self.latest:
            self._attempts.append(row.attempt)
            if len(self._attempts) > KEPT_ATTEMPTS:
                del self._attempts[: KEPT_ATTEMPTS // 2]
                self._first_local += KEPT_ATTEMPTS // 2
        group_layers = None if layers is None else layers[self.tensors]
        return [self._event_of_run(event) for event in self.judge.update(self._local_row(row), group_layers)]

    def located(self, row: StepMetrics, module: str, kind: str, **where: Any) -> list[Event]:
        events = self.judge.located(self._local_row(row), module, kind, **where)
        return [self._event_of_run(event) for event in events]

    def rewound(self, attempt: int, step: int) -> None:
        self.judge.rewound(self._local_attempt(attempt), step)

    @property
    def proven(self) -> int:
        return self._attempt_of_run(self.judge.proven)

    def _local_attempt(self, attempt: int) -> int:
        return self._first_local + bisect.bisect_right(self._attempts, attempt) - 1

    def _local_row(self, row: StepMetrics) -> StepMetrics:
        """A row as the group's judge sees it."""
        return replace(row, attempt=self._local_attempt(row.attempt), optimizer=self.members.index(row.optimizer))

    def _attempt_of_run(self, local: int) -> int:
        """The run's number of a local attempt; negative ones mean none."""
        if local < 0 or not self._attempts:
            return min(local, -1)
        index = local - self._first_local
        return self._attempts[min(index, len(self._attempts) - 1)] if index >= 0 else max(self._attempts[0] + index, 0)

    def _event_of_run(self, event: Event) -> Event:
        """An event with the run's numbers and the group's label."""
        changes: dict[str, Any] = {"attempt": self._attempt_of_run(event.attempt)}
        if isinstance(event, Decision):
            attempt = event.max_attempt
            changes["optimizers"] = self.members
            changes["max_attempt"] = self._attempt_of_run(attempt) if attempt > 0 else attempt
            changes["reason"] = f"{self._label}: {event.reason}"
        elif isinstance(event, Finding | Diagnosis | Outcome):
            changes["detail"] = f"{self._label}: {event.detail}"
        if isinstance(event, Finding | Diagnosis):
            changes["evidence"] = event.evidence | {"optimizers": list(self.members)}
        return replace(event, **changes)

    def state_dict(self) -> dict[str, Any]:
        attempts = self._attempts[-BASELINE_ROWS:]
        return {
            "members": list(self.members),
            "attempts": attempts,
            "first": self._first_local + len(self._attempts) - len(attempts),
            "judge": self.judge.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._attempts, self._first_local = list(state["attempts"]), state["first"]
        self.judge.load_state_dict(state["judge"])


class MultiOptimizerJudge:
    """Judges a run of several optimizers: as one, until some of them step on a backward of their own."""

    def __init__(
        self,
        policy: Policy,
        names: Sequence[str],
        *,
        scopes: Sequence[Scope],
        kinds: Sequence[str] = (),
        **judge_options: Any,
    ) -> None:
        self.policy, self.names = policy, names
        self.buffers: Sequence[str] = judge_options.get("buffers", ())
        self._scopes, self._kinds = [tuple(scope) for scope in scopes], list(kinds)
        self._judge_options = judge_options
        self._joint_judge: Judge | None = Judge(policy, names, kinds=kinds, **judge_options)
        """The judge of all optimizers, as long as they step together."""
        self._groups: list[OptimizerGroup] = []
        self._attempt = -1
        self._stepped: set[int] = set()
        """The optimizers that had rows for the last attempt."""
        self._partners: list[set[int]] = [set() for _ in scopes]
        """For each optimizer, those that have stepped with it on one backward."""
        self._seen: set[int] = set()
        self._attempts_apart = 0
        """Attempts since the last joint one in which some optimizers stepped without the first of them."""

    # -- which optimizers are judged as one

    def _step_in_turn(self, row: StepMetrics) -> bool:
        """Whether this row shows that the optimizers step in turn, and not together."""
        k = row.optimizer
        if row.attempt == self._attempt:
            for other in self._stepped - {k}:
                self._partners[k].add(other)
                self._partners[other].add(k)
            self._stepped.add(k)
            self._seen.add(k)
            return False
        last, self._attempt, self._stepped = self._stepped, row.attempt, {k}
        if len(last) > 1:
            self._attempts_apart = 0
        elif any(self._partners[other] and min(self._partners[other]) < other for other in last):
            self._attempts_apart += 1
        alone = bool(self._seen - {k}) and not self._partners[k]
        self._seen.add(k)
        apart = self._attempts_apart >= REPEAT_COUNT
        if apart:  # they did step together once, but no longer do
            self._partners = [set() for _ in self._partners]
        return alone or apart

    def _split(self, row: StepMetrics) -> list[Event]:
        """Give each group a new judge of its own; overrides for all optimizers end."""
        joint, self._joint_judge = self._joint_judge, None
        parts = {frozenset({k} | partners) for k, partners in enumerate(self._partners)}
        self._groups = [self._make_group(tuple(sorted(part))) for part in sorted(parts, key=min)]
        if joint is None or joint.overrides == NO_OVERRIDES:
            return []
        reason = "the optimizers step in turn and are judged separately: overrides for all of them are lifted"
        where: dict[str, Any] = {"step": row.step, "attempt": row.attempt, "time": row.time}
        applied = not self.policy.observe
        return [Decision(**where, action=Action.RELAX, reason=reason, applied=applied, overrides=NO_OVERRIDES)]

    def _join(self, row: StepMetrics) -> None:
        """An optimizer whose first step is on a backward of others is judged with them."""
        group = self._group_of(row.optimizer)
        other = next((g for g in self._groups if g is not group and g.latest == row.attempt), None)
        if other is not None and group.latest < 0:
            joined = self._make_group(tuple(sorted({*group.members, *other.members})))
            self._groups = sorted([joined, *(g for g in self._groups if g not in (group, other))], key=_first_member)

    def rewired(self, names: Sequence[str], scopes: Sequence[Scope]) -> None:
        """The optimizers hold other tensors now."""
        self.names, self._scopes, self._kinds = names, [tuple(scope) for scope in scopes], []
        for group in self._groups:
            group.tensors = self._tensors(group.members)

    def _tensors(self, members: Sequence[int]) -> np.ndarray:
        return np.concatenate([np.arange(*self._scopes[k]) for k in members]).astype(np.int64)

    def _make_group(self, members: tuple[int, ...]) -> OptimizerGroup:
        tensors = self._tensors(members)
        indices: list[int] = tensors.tolist()
        names = [self.names[i] for i in indices if i < len(self.names)]
        kinds = [self._kinds[i] for i in indices if i < len(self._kinds)]
        options = self._judge_options | {"kinds": kinds, "owned": None, "values": 0, "adversarial": True}
        return OptimizerGroup(members, Judge(self.policy, names, **options), tensors, _label(members, names))

    def _group_of(self, optimizer: int) -> OptimizerGroup:
        return next(group for group in self._groups if optimizer in group.members)

    # -- one row

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Event]:
        events: list[Event] = []
        if self._joint_judge is not None and self._step_in_turn(row):
            events = self._split(row)
        if self._joint_judge is not None:
            return self._joint_judge.update(row, layers)
        self._join(row)
        group = self._group_of(row.optimizer)
        group.judge.decisions_paused = any(g.judge.rewind_pending for g in self._groups if g is not group)
        return [*events, *group.update(row, layers)]

    def located(self, row: StepMetrics, module: str, kind: str, **where: Any) -> list[Event]:
        judge = self._joint_judge or self._group_of(row.optimizer)
        return judge.located(row, module, kind, **where)

    def rewound(self, attempt: int, step: int) -> None:
        for judge in [self._joint_judge] if self._joint_judge is not None else self._groups:
            judge.rewound(attempt, step)

    def failed(self, decision: Decision, why: str) -> None:
        if self._joint_judge is not None:
            self._joint_judge.failed(decision, why)
        for group in self._groups:
            if group.members == decision.optimizers:
                group.judge.failed(decision, why)

    # -- the state of the run

    def _active_judges(self) -> list[Judge]:
        """The judges that count: those of optimizers that still step."""
        if self._joint_judge is not None:
            return [self._joint_judge]
        newest = max(group.latest for group in self._groups)
        oldest = newest - ACTIVE_ATTEMPTS
        return [group.judge for group in self._groups if 0 <= oldest <= group.latest or oldest < 0]

    @property
    def quiet(self) -> bool:
        return all(judge.quiet for judge in self._active_judges())

    @property
    def wants_weight_check(self) -> bool:
        return any(judge.wants_weight_check for judge in self._active_judges())

    @property
    def proven(self) -> int:
        """States up to this attempt are known to be good, by the healthy steps of all optimizers that followed."""
        if self._joint_judge is not None:
            return self._joint_judge.proven
        active = self._active_judges()
        return min(group.proven for group in self._groups if group.judge in active)

    @property
    def overrides_by_optimizer(self) -> list[tuple[tuple[int, ...], StepOverrides]]:
        if self._joint_judge is not None:
            return self._joint_judge.overrides_by_optimizer
        return [(group.members, group.judge.overrides) for group in self._groups]

    # -- state

    def state_dict(self) -> dict[str, Any]:
        if self._joint_judge is not None:
            return self._joint_judge.state_dict() | {"mates": [sorted(partners) for partners in self._partners]}
        return {"groups": [group.state_dict() for group in self._groups]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state; one without groups is that of all optimizers together."""
        if "groups" not in state:
            joint = Judge(self.policy, self.names, kinds=self._kinds, **self._judge_options)
            joint.load_state_dict(state)
            self._joint_judge, self._groups = joint, []
            partners = state.get("mates", [])
            self._partners = [set(partners[k]) if k < len(partners) else set() for k in range(len(self._scopes))]
            return
        if sorted(k for group in state["groups"] for k in group["members"]) != list(range(len(self._scopes))):
            raise ValueError("the state was saved by a run with other optimizers")
        groups = [self._make_group(tuple(group["members"])) for group in state["groups"]]
        for group, group_state in zip(groups, state["groups"], strict=True):
            group.load_state_dict(group_state)
        self._joint_judge, self._groups = None, groups


AnyJudge = Judge | MultiOptimizerJudge


def make_judge(policy: Policy, names: Sequence[str], *, scopes: Sequence[Scope] = (), **judge_options: Any) -> AnyJudge:
    """The judge of a run; `scopes` says which tensors each optimizer holds, where there are several."""
    if len(scopes) < 2:
        return Judge(policy, names, **judge_options)
    return MultiOptimizerJudge(policy, names, scopes=scopes, **judge_options)


def _first_member(group: OptimizerGroup) -> int:
    return group.members[0]


def _label(members: Sequence[int], names: Sequence[str]) -> str:
    """An optimizer in words: its number, and the part of the model it trains, if that is one part."""
    numbers = " and ".join(str(k) for k in members)
    parts = {name.split(".")[0] for name in names if "." in name}
    return f"optimizer {numbers} ({parts.pop()})" if len(parts) == 1 else f"optimizer {numbers}"
