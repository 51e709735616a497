"""`surefoot bench replay`: recorded rows through a fresh judge, to see its decisions made again, or other ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path

from benchmarks import regate
from benchmarks.recorded_run import Recorded, Told, recorded
from benchmarks.regate import Regate
from surefoot.journal.strict_json import dumps
from surefoot.judge.multi_optimizer import AnyJudge
from surefoot.judge.policy import Policy
from surefoot.records import Action, Decision, StepMetrics

UNJUDGED = ("weights_every", "system_every", "snapshot_every", "max_snapshots")
"""Figures of a policy that change what is measured and kept, and no decision over it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One decision as it was recorded and as it was made again; None where there was none."""

    then: Decision | None
    now: Decision | None
    hypothetical: bool = False
    """It comes after a difference: the run would have gone another way, and with it these rows."""

    @property
    def at(self) -> Decision:
        found = self.then or self.now
        assert found is not None
        return found

    @property
    def same(self) -> bool:
        return _told(self.then) == _told(self.now)

    @property
    def apart(self) -> list[str]:
        """The fields that differ."""
        if self.then is None or self.now is None:
            return []
        then, now = self.then.as_json(), self.now.as_json()
        return [name for name in then if dumps(then[name]) != dumps(now[name])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What came of a replay."""

    path: Path
    policy: Policy
    """The one that judged; that of the last attach where each had its own."""
    same_policy: bool
    """The run was judged by the same one then."""
    rows: int
    """Rows that were judged again."""
    pairs: Sequence[Pair]
    notes: Sequence[str]
    """What could not be as it was, in words."""

    @property
    def recorded(self) -> list[Decision]:
        return [pair.then for pair in self.pairs if pair.then is not None]

    @property
    def again(self) -> list[Decision]:
        return [pair.now for pair in self.pairs if pair.now is not None]

    @property
    def differences(self) -> list[Pair]:
        return [pair for pair in self.pairs if not pair.same]


def replay(run_dir: str | Path, policy: Policy | None = None) -> Replay:
    """Judge a recorded run again, by its own policy or by another; ValueError where that cannot be done."""
    runs, notes = recorded(run_dir)
    pairs: list[Pair] = []
    rows = without = 0
    for run in runs:
        again = _Again(run, policy or run.policy)
        pairs += paired(run.decisions, again.decisions())
        rows += again.rows
        without += run.without
    if without:
        notes.append(
            f"the per-tensor numbers of {without} updates are no longer kept: what was decided by them may differ"
        )
    judged = policy or runs[-1].policy
    return Replay(
        path=Path(run_dir),
        policy=judged,
        same_policy=all(judges_alike(run.policy, policy or run.policy) for run in runs),
        rows=rows,
        pairs=_marked(pairs),
        notes=notes,
    )


def judges_alike(one: Policy, two: Policy) -> bool:
    """Whether two policies are the same as far as decisions go."""
    return all(getattr(one, f.name) == getattr(two, f.name) for f in fields(Policy) if f.name not in UNJUDGED)


class _Again:
    """One attach, judged again."""

    def __init__(self, run: Recorded, policy: Policy) -> None:
        self.rows = 0
        self._run = run
        self._judge: AnyJudge = run.judge(policy)
        self._made: list[Decision] = []
        self._stopped = False
        """The run was stopped, and no update has landed since."""
        self._done = {(d.attempt, d.action) for d in run.decisions if d.applied}
        other = any(getattr(policy, name) != getattr(run.policy, name) for name in regate.FIGURES)
        self._gate = Regate(run.policy, policy) if other else None

    def decisions(self) -> list[Decision]:
        for seen in self._run.rows():
            for told in seen.told:
                self._tell(told)
            row = seen.row if self._gate is None else self._gate(seen.row)
            if not seen.judged:
                continue
            self.rows += 1
            events = self._judge.update(row, seen.layers)
            decided = [e for e in events if isinstance(e, Decision) and not self._untold(e)]
            self._stopped = not row.applied and (self._stopped or any(d.action is Action.STOP for d in decided))
            self._made += decided
            if self._ends(decided):
                break
        return self._made

    def _untold(self, decision: Decision) -> bool:
        """A loop that goes on after it was stopped is stopped again each time, which was not written down each time."""
        again = self._stopped and decision.action is Action.STOP
        return again and (decision.attempt, decision.action) not in self._done

    def _tell(self, told: Told) -> None:
        if told.origin is not None:
            where = {name: told.origin[name] for name in ("module", "kind", "inputs", "weights")}
            self._judge.located(StepMetrics(step=told.step, attempt=told.attempt, time=0.0), **where)
            return
        if told.failed is None:
            self._judge.rewound(told.attempt, told.step)
            if self._gate is not None:
                self._gate.rewound(told.attempt)
            return
        then = (told.failed.attempt, told.failed.action)
        ours = next((d for d in self._made if (d.attempt, d.action) == then), None)
        if ours is not None:
            self._judge.failed(ours, told.why)

    def _ends(self, decided: Iterable[Decision]) -> bool:
        """Whether the run would have ended here; and where it would have gone back but did not, the judge is told."""
        for decision in decided:
            if not decision.applied or (decision.attempt, decision.action) in self._done:
                continue
            if decision.action is Action.STOP:
                return True
            if decision.action is Action.REWIND:
                self._judge.failed(decision, "the recorded run did not go back")
        return False


def paired(then: Sequence[Decision], now: Sequence[Decision]) -> Iterator[Pair]:
    """Decisions over the same attempt and of the same kind side by side, in the order of attempts."""
    sides = [dict(zip(_keys(side), side, strict=True)) for side in (then, now)]
    for key in sorted(dict.fromkeys(chain(*sides)), key=lambda key: key[0]):
        yield Pair(then=sides[0].get(key), now=sides[1].get(key))


def _keys(decisions: Sequence[Decision]) -> Iterator[tuple[int, Action, int]]:
    """Attempt, action, and which of them it is: several optimizers may each have one."""
    count: Counter[tuple[int, Action]] = Counter()
    for d in decisions:
        yield d.attempt, d.action, count[d.attempt, d.action]
        count[d.attempt, d.action] += 1


def _marked(pairs: Sequence[Pair]) -> list[Pair]:
    first = next((pair.at.attempt for pair in pairs if not pair.same), None)
    return [replace(p, hypothetical=first is not None and p.at.attempt > first) for p in pairs]


def _told(decision: Decision | None) -> str:
    """All of a decision, as the journal would have it."""
    return "" if decision is None else dumps(decision.as_json())
