"""`surefoot bench healthy`: the zoo's suspicious but healthy runs with ever new seeds, under surefoot, to see whether
any of them is touched."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import surefoot
from benchmarks.worker_pool import each
from benchmarks.zoo import CONTROLS
from benchmarks.zoo.attached import Attached
from benchmarks.zoo.families import Split
from benchmarks.zoo.scenario import SEEDS, Scenario
from benchmarks.zoo.training import train
from surefoot.records import Action

FIRST_SEED = 20_000
"""Seeds from here on belong to nobody: nothing was tuned on them, nor reported from them, in `bench zoo`."""


@dataclass(frozen=True, slots=True)
class Task:
    """One run: a control of a part of the zoo, with a seed of its own."""

    name: str
    family: str
    split: Split
    seed: int

    @property
    def scenario(self) -> Scenario:
        first = SEEDS[self.split][0]
        found = (s for s in CONTROLS[self.name].scenarios(self.split) if s.settings.family == self.family)
        one = next(s for s in found if s.settings.seed == first)
        return replace(one, settings=replace(one.settings, seed=self.seed))


@dataclass(frozen=True, slots=True)
class Found:
    """What surefoot did to one healthy run, and said of it."""

    task: Task
    steps: int
    interventions: tuple[tuple[int, str, str], ...]
    """Attempt, action and reason of each."""
    findings: int


@dataclass(slots=True)
class Tally:
    first: int = FIRST_SEED
    steps: int = 0
    runs: int = 0
    findings: int = 0
    touched: list[Found] = field(default_factory=list)

    def add(self, found: Found) -> None:
        self.runs += 1
        self.steps += found.steps
        self.findings += found.findings
        if found.interventions:
            self.touched.append(found)

    @property
    def interventions(self) -> int:
        return sum(len(found.interventions) for found in self.touched)

    def as_text(self) -> str:
        often = 1e5 * self.findings / max(self.steps, 1)
        done = f"{self.interventions} interventions in {len(self.touched)} runs"
        runs = f"{self.runs} healthy runs with seeds from {self.first} on, {self.steps:,} steps"
        lines = [f"{runs}: {done}, {often:.0f} findings per 100,000 steps."]
        if not self.touched:
            lines.append(f"With 95 % confidence: fewer than {3e5 / max(self.steps, 1):.2f} in 100,000 steps.")
        for found in sorted(self.touched, key=lambda found: (found.task.seed, found.task.name, found.task.family)):
            at, action, reason = found.interventions[0]
            lines.append(
                f"{found.task.name} in {found.task.family}, seed {found.task.seed}: {action} at {at}: {reason}"
            )
        return "\n".join(lines)


def tasks(split: Split, steps: int, first: int = FIRST_SEED) -> Iterator[Task]:
    """Controls of this part, seed after seed, until they have so many healthy steps together."""
    taken, seed = 0, first
    while taken < steps:
        for kind in CONTROLS.values():
            for one in kind.scenarios(split):
                if one.settings.seed == SEEDS[split][0]:
                    taken += one.settings.steps - one.onset
                    yield Task(kind.name, one.settings.family, split, seed)
        seed += 1


def one(task: Task) -> Found:
    """Make one run; up to its onset a control is its twin, and only what comes after is counted."""
    scenario = task.scenario
    with tempfile.TemporaryDirectory() as folder:
        train(scenario.run(), Attached(Path(folder), observe=False))
        events = [e for e in surefoot.read(folder).events if e["attempt"] >= scenario.onset]
    done = [e for e in events if e["kind"] == "decision" and e["applied"] and e["action"] != Action.RELAX]
    told = tuple((e["attempt"], str(e["action"]), str(e["reason"])) for e in done)
    return Found(task, scenario.settings.steps - scenario.onset, told, sum(e["kind"] == "finding" for e in events))


def main(split: Split, *, steps: int, first: int, workers: int, progress: Callable[[int, int], None]) -> Tally:
    """Run them all and count."""
    todo, tally = list(tasks(split, steps, first)), Tally(first)
    for found in each(one, todo, workers):
        tally.add(found)
        progress(tally.runs, len(todo))
    return tally
