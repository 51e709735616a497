"""A judge for each group of optimizers that step together: what is normal for a critic is not for its generator.

Optimizers that step on one backward share a loss, and stand or fall together: they are judged as one. Those that step
in turn have a loss, gradients and weights of their own each; a judge of their own sees only their rows, as if they were
a run by themselves. What is decided about one of them says which optimizers it is for; going back concerns all.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from surefoot.judge.judge import Judge
from surefoot.judge.policy import AGAIN, LONG, Policy
from surefoot.records import Action, Decision, Diagnosis, Event, Finding, Outcome, StepMetrics, StepOverrides

Scope = tuple[int, int]
"""The first tensor of an optimizer, and the one after its last."""
KEPT = 16 * LONG
"""Attempts of a group that are remembered by their number in the run."""
ACTIVE = 4 * LONG
"""Attempts of the run after which a group that did not step has no say."""
FREE = StepOverrides()


class Group:
    """Optimizers that are judged as one, and the numbers of their attempts: their judge counts its own rows alone."""

    def __init__(self, members: tuple[int, ...], judge: Judge, tensors: np.ndarray, label: str) -> None:
        self.members, self.judge = members, judge
        self.tensors = tensors
        """Places of their tensors among all."""
        self._label = label
        self._attempts: list[int] = []
        self._first = 0
        """The group's own number of the first attempt that is remembered."""

    @property
    def latest(self) -> int:
        """The last attempt of the run that was theirs; -1 before the first."""
        return self._attempts[-1] if self._attempts else -1

    def update(self, row: StepMetrics, layers: np.ndarray | None) -> list[Event]:
        if row.attempt != self.latest:
            self._attempts.append(row.attempt)
            if len(self._attempts) > KEPT:
                del self._attempts[: KEPT // 2]
                self._first += KEPT // 2
        own = None if layers is None else layers[self.tensors]
        events = self.judge.update(self._inside(row), own)
        return [self._outside(event) for event in events]

    def located(self, row: StepMetrics, *args: str, **told: bool) -> list[Event]:
        events = self.judge.located(self._inside(row), *args, **told)  # pyright: ignore[reportCallIssue]
        return [self._outside(event) for event in events]

    def rewound(self, attempt: int, step: int) -> None:
        known = bisect.bisect_right(self._attempts, attempt)
        self.judge.rewound(self._first + known - 1, step)

    @property
    def proven(self) -> int:
        return self._of_run(self.judge.proven)

    def _inside(self, row: StepMetrics) -> StepMetrics:
        """A row as the group's own judge sees it."""
        own = self._first + bisect.bisect_right(self._attempts, row.attempt) - 1
        return replace(row, attempt=own, optimizer=self.members.index(row.optimizer))

    def _of_run(self, own: int) -> int:
        """The run's number of one of the group's attempts; negative ones mean none."""
        if own < 0 or not self._attempts:
            return min(own, -1)
        place = own - self._first
        return self._attempts[min(place, len(self._attempts) - 1)] if place >= 0 else max(self._attempts[0] + place, 0)

    def _outside(self, event: Event) -> Event:
        """An event as it is told of the run."""
        told: dict[str, Any] = {"attempt": self._of_run(event.attempt)}
        if isinstance(event, Decision):
            told["optimizers"] = self.members
            told["max_attempt"] = self._of_run(event.max_attempt) if event.max_attempt > 0 else event.max_attempt
        if isinstance(event, Decision):
            told["reason"] = f"{self._label}: {event.reason}"
        elif isinstance(event, Finding | Diagnosis | Outcome):
            told["detail"] = f"{self._label}: {event.detail}"
        if isinstance(event, Finding | Diagnosis):
            told["evidence"] = event.evidence | {"optimizers": list(self.members)}
        return replace(event, **told)

    def state_dict(self) -> dict[str, Any]:
        kept = self._attempts[-LONG:]
        return {
            "members": list(self.members),
            "attempts": kept,
            "first": self._first + len(self._attempts) - len(kept),
            "judge": self.judge.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._attempts, self._first = list(state["attempts"]), state["first"]
        self.judge.load_state_dict(state["judge"])


class SeveralJudge:
    """Judges a run of several optimizers: as one, until some of them are seen to step on a backward of their own."""

    def __init__(
        self, policy: Policy, names: Sequence[str], *, scopes: Sequence[Scope], kinds: Sequence[str] = (), **told: Any
    ) -> None:
        self.policy, self.names = policy, names
        self.buffers: Sequence[str] = told.get("buffers", ())
        self._scopes, self._kinds, self._told = [tuple(scope) for scope in scopes], list(kinds), told
        self._whole: Judge | None = Judge(policy, names, kinds=kinds, **told)
        """The judge of all of them, as long as they are seen to step together."""
        self._groups: list[Group] = []
        self._attempt = -1
        self._stepped: set[int] = set()
        """The optimizers that brought rows for the last attempt."""
        self._mates: list[set[int]] = [set() for _ in scopes]
        """For each optimizer, those that have stepped with it on one backward."""
        self._seen: set[int] = set()
        self._apart = 0
        """Attempts since the last one of several optimizers in which some stepped without the first of them."""

    # -- which optimizers are judged as one

    def _in_turn(self, row: StepMetrics) -> bool:
        """Whether this row says that the optimizers step in turn, and not together."""
        k = row.optimizer
        if row.attempt == self._attempt:
            for other in self._stepped - {k}:
                self._mates[k].add(other)
                self._mates[other].add(k)
            self._stepped.add(k)
            self._seen.add(k)
            return False
        last, self._attempt, self._stepped = self._stepped, row.attempt, {k}
        if len(last) > 1:
            self._apart = 0
        elif any(self._mates[other] and min(self._mates[other]) < other for other in last):
            self._apart += 1
        alone = bool(self._seen - {k}) and not self._mates[k]
        self._seen.add(k)
        if self._apart >= AGAIN:  # they did step together once
            self._mates = [set() for _ in self._mates]
        return alone or self._apart >= AGAIN

    def _split(self, row: StepMetrics) -> list[Event]:
        """From here on each group has a judge of its own, which begins anew; what was asked of the steps ends."""
        whole, self._whole = self._whole, None
        parts = {frozenset({k} | mates) for k, mates in enumerate(self._mates)}
        self._groups = [self._group(tuple(sorted(part))) for part in sorted(parts, key=min)]
        if whole is None or whole.restraint == FREE:
            return []
        words = "the optimizers step in turn and are judged one by one: what was asked of all of them ends"
        where: dict[str, Any] = {"step": row.step, "attempt": row.attempt, "time": row.time}
        applied = not self.policy.observe
        return [Decision(**where, action=Action.RELAX, reason=words, applied=applied, overrides=FREE)]

    def _join(self, row: StepMetrics) -> None:
        """An optimizer that steps for the first time, on a backward of others, is judged with them."""
        group = self._of(row.optimizer)
        other = next((g for g in self._groups if g is not group and g.latest == row.attempt), None)
        if other is not None and group.latest < 0:
            joined = self._group(tuple(sorted({*group.members, *other.members})))
            self._groups = sorted([joined, *(g for g in self._groups if g not in (group, other))], key=_lead)

    def rewired(self, names: Sequence[str], scopes: Sequence[Scope]) -> None:
        """The optimizers hold other tensors now."""
        self.names, self._scopes, self._kinds = names, [tuple(scope) for scope in scopes], []
        for group in self._groups:
            group.tensors = self._tensors(group.members)

    def _tensors(self, members: Sequence[int]) -> np.ndarray:
        return np.concatenate([np.arange(*self._scopes[k]) for k in members]).astype(np.int64)

    def _group(self, members: tuple[int, ...]) -> Group:
        tensors = self._tensors(members)
        places: list[int] = tensors.tolist()
        names = [self.names[i] for i in places if i < len(self.names)]
        kinds = [self._kinds[i] for i in places if i < len(self._kinds)]
        judge = Judge(
            self.policy, names, **self._told | {"kinds": kinds, "owned": None, "values": 0, "contested": True}
        )
        return Group(members, judge, tensors, _label(members, names))

    def _of(self, optimizer: int) -> Group:
        return next(group for group in self._groups if optimizer in group.members)

    # -- one row

    def update(self, row: StepMetrics, layers: np.ndarray | None = None) -> list[Event]:
        events: list[Event] = []
        if self._whole is not None and self._in_turn(row):
            events = self._split(row)
        if self._whole is not None:
            return self._whole.update(row, layers)
        self._join(row)
        group = self._of(row.optimizer)
        group.judge.held = any(other.judge.rewind_pending for other in self._groups if other is not group)
        return [*events, *group.update(row, layers)]

    def located(self, row: StepMetrics, module: str, kind: str, *, inputs: bool, weights: bool) -> list[Event]:
        judge = self._whole or self._of(row.optimizer)
        return judge.located(row, module, kind, inputs=inputs, weights=weights)

    def rewound(self, attempt: int, step: int) -> None:
        for judge in [self._whole] if self._whole is not None else self._groups:
            judge.rewound(attempt, step)

    def failed(self, decision: Decision, why: str) -> None:
        if self._whole is not None:
            self._whole.failed(decision, why)
        for group in self._groups:
            if group.members == decision.optimizers:
                group.judge.failed(decision, why)

    # -- how things are

    def _active(self) -> list[Judge]:
        """The judges that have a say: those of optimizers that still step."""
        if self._whole is not None:
            return [self._whole]
        newest = max(group.latest for group in self._groups)
        return [group.judge for group in self._groups if 0 <= newest - ACTIVE <= group.latest or newest < ACTIVE]

    @property
    def quiet(self) -> bool:
        return all(judge.quiet for judge in self._active())

    @property
    def wants_weight_check(self) -> bool:
        return any(judge.wants_weight_check for judge in self._active())

    @property
    def proven(self) -> int:
        """States up to this attempt are known to be good, by the steps of all optimizers that followed."""
        if self._whole is not None:
            return self._whole.proven
        active = self._active()
        return min(group.proven for group in self._groups if group.judge in active)

    @property
    def restraints(self) -> list[tuple[tuple[int, ...], StepOverrides]]:
        if self._whole is not None:
            return self._whole.restraints
        return [(group.members, group.judge.restraint) for group in self._groups]

    # -- state

    def state_dict(self) -> dict[str, Any]:
        if self._whole is not None:
            return self._whole.state_dict() | {"mates": [sorted(mates) for mates in self._mates]}
        return {"groups": [group.state_dict() for group in self._groups]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Know again what was known then; a state that knew of no groups is that of all optimizers together."""
        if "groups" not in state:
            whole = Judge(self.policy, self.names, kinds=self._kinds, **self._told)
            whole.load_state_dict(state)
            self._whole, self._groups = whole, []
            held = state.get("mates", [])
            self._mates = [set(held[k]) if k < len(held) else set() for k in range(len(self._scopes))]
            return
        if sorted(k for held in state["groups"] for k in held["members"]) != list(range(len(self._scopes))):
            raise ValueError("it was saved by a run with other optimizers")
        groups = [self._group(tuple(held["members"])) for held in state["groups"]]
        for group, held in zip(groups, state["groups"], strict=True):
            group.load_state_dict(held)
        self._whole, self._groups = None, groups


AnyJudge = Judge | SeveralJudge


def judge_of(policy: Policy, names: Sequence[str], *, scopes: Sequence[Scope] = (), **told: Any) -> AnyJudge:
    """The judge of a run: `scopes` tells which tensors each optimizer holds, where there are several."""
    return Judge(policy, names, **told) if len(scopes) < 2 else SeveralJudge(policy, names, scopes=scopes, **told)


def _lead(group: Group) -> int:
    return group.members[0]


def _label(members: Sequence[int], names: Sequence[str]) -> str:
    """An optimizer in words: its number, and the part of the model that it trains, if all is one part."""
    numbers = " and ".join(str(k) for k in members)
    parts = {name.split(".")[0] for name in names if "." in name}
    return f"optimizer {numbers} ({parts.pop()})" if len(parts) == 1 else f"optimizer {numbers}"
