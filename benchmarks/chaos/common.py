"""What all faults share: victims to try them on, an unharmed run to compare with, and what came of it."""

from __future__ import annotations

import json
import random
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.chaos.nursery import Nursery
from benchmarks.chaos.victim import Plan
from surefoot.checkpoint.store import CheckpointStore
from surefoot.checkpoint.store.manifest import NAME


@dataclass(slots=True)
class Tally:
    """How often a fault was tried, and when it was not survived."""

    fault: str
    passes: str
    """What it takes to survive it."""
    tried: int = 0
    lost: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def survived(self) -> int:
        return self.tried - len(self.lost)

    def take(self, wrong: str, what: str) -> None:
        """One more was tried, with this wrong, or nothing."""
        self.tried += 1
        if wrong:
            self.lost.append(f"{what}: {wrong}"[:2000])


@dataclass(frozen=True, slots=True)
class Seen:
    """What a run left beside its folder: every loss it had, and its end."""

    losses: list[dict[str, str]]
    ends: list[dict[str, str]]
    unlike: str = ""
    """A loss that came twice and was not the same."""


class Bench:
    """A folder for runs, and the nursery."""

    def __init__(self, folder: Path, nursery: Nursery, *, seed: int = 0, say: Callable[[str], None] = print) -> None:
        self.folder, self.nursery, self.say = folder, nursery, say
        self.dice = random.Random(seed)
        self._runs = 0
        self.reference = cache(self._reference)

    def new(self, name: str) -> str:
        """A path for a new run."""
        self._runs += 1
        return str(self.folder / f"{name}-{self._runs:04d}")

    def live(self, plan: Plan, world: int = 1, seconds: float = 120.0) -> list[int]:
        """Let a run live until it ends by itself; how its processes ended."""
        team = self.nursery.team(plan, world)
        return [one.wait(seconds) for one in team]

    def _reference(self, plan: Plan, world: int) -> Seen:
        plan = replace(plan, run=self.new("bare"))
        if codes := [code for code in self.live(plan, world) if code]:
            raise RuntimeError(f"a run that nobody touched ended with {codes}: {words(plan)}")
        return seen(plan, world)

    def unharmed(self, plan: Plan, world: int) -> Seen:
        """The same run without surefoot's checkpoints, that nothing happens to."""
        bare = Plan(
            run="",
            way="bare",
            steps=plan.steps,
            precision=plan.precision,
            accumulate=plan.accumulate,
            spread=plan.spread,
            batch=plan.batch,
        )
        return self.reference(bare, world)

    def compare(self, plan: Plan, world: int = 1) -> str:
        """What is not, bit for bit, as in the unharmed run; empty if all is."""
        ours, theirs = seen(plan, world), self.unharmed(plan, world)
        if ours.unlike:
            return ours.unlike
        for rank, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True)):
            unlike = [step for step in b if a.get(step) != b[step]]
            if unlike or a.keys() - b.keys():
                return f"the loss of step {(unlike or sorted(a.keys() - b.keys()))[0]} on rank {rank} is another"
        for a, b in zip(ours.ends, theirs.ends, strict=True):
            unlike = [part for part in b if a.get(part) != b[part]]
            if unlike:
                return f"at the end {', '.join(unlike)} differ"
        return ""


def seen(plan: Plan, world: int) -> Seen:
    losses, ends, unlike = [], [], ""
    for rank in range(world):
        here: dict[str, str] = {}
        for step, loss, _ in lines(plan, rank):
            if here.setdefault(step, loss) != loss:
                unlike = f"step {step} had another loss when it came again"
        losses.append(here)
        end = Path(f"{plan.run}.end-{rank}")
        ends.append(json.loads(end.read_text()) if end.exists() else {})
    return Seen(losses, ends, unlike)


def lines(plan: Plan, rank: int = 0) -> list[tuple[str, str, int]]:
    """Step, loss and time of each batch so far."""
    path = Path(f"{plan.run}.losses-{rank}")
    if not path.exists():
        return []
    words = [line.split() for line in path.read_text().splitlines()]
    return [(w[0], w[1], int(w[2])) for w in words if len(w) == 3]


def last_step(plan: Plan) -> int:
    """The update the run was at when it was last heard of."""
    found = lines(plan)
    return int(found[-1][0].split(".")[0]) if found else 0


def under_way(plan: Plan, name: str, step: int) -> int:
    """For how many steps the loop went on before this checkpoint was written."""
    sealed = (Path(plan.run) / "checkpoints" / name / NAME).stat().st_mtime_ns
    times = [(when, int(at.split(".")[0])) for at, _, when in lines(plan)]
    before = bisect_right(times, (sealed, 1 << 60))
    return max(0, times[before - 1][1] - step) if before else 0


def store_of(plan: Plan) -> CheckpointStore:
    return CheckpointStore(Path(plan.run) / "checkpoints")


def words(plan: Plan, world: int = 2) -> str:
    """The last that the processes of a run have said."""
    logs = [Path(f"{plan.run}.log-{rank}") for rank in range(world)]
    return "\n".join(log.read_text(errors="replace")[-1500:] for log in logs if log.exists())


def events(plan: Plan) -> list[dict[str, Any]]:
    import surefoot.journal.reader as reader

    return [e for e in reader.read(Path(plan.run)).events if e["kind"] == "checkpoint"]
