"""`surefoot bench healthy`: the zoo's suspicious but healthy runs with ever new seeds, under surefoot, to see whether
any of them is touched."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import surefoot
from benchmarks.worker_pool import run_unordered
from benchmarks.zoo import CONTROLS
from benchmarks.zoo.attached import SurefootProtector
from benchmarks.zoo.families import Split
from benchmarks.zoo.scenario import SEEDS, Scenario
from benchmarks.zoo.training import train
from surefoot.records import Action

FIRST_SEED = 20_000
"""Seeds from here on belong to nobody: nothing was tuned on them, nor reported from them, in `bench zoo`."""


@dataclass(frozen=True, slots=True)
class HealthyTask:
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
class HealthyResult:
    """What surefoot did to one healthy run, and said of it."""

    task: HealthyTask
    steps: int
    interventions: tuple[tuple[int, str, str], ...]
    """Attempt, action and reason of each."""
    findings: int


@dataclass(slots=True)
class HealthyTally:
    first_seed: int = FIRST_SEED
    steps: int = 0
    runs: int = 0
    findings: int = 0
    touched: list[HealthyResult] = field(default_factory=list)

    def add(self, found: HealthyResult) -> None:
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
        runs = f"{self.runs} healthy runs with seeds from {self.first_seed} on, {self.steps:,} steps"
        lines = [f"{runs}: {done}, {often:.0f} findings per 100,000 steps."]
        if not self.touched:
            lines.append(f"With 95 % confidence: fewer than {3e5 / max(self.steps, 1):.2f} in 100,000 steps.")
        for found in sorted(self.touched, key=lambda found: (found.task.seed, found.task.name, found.task.family)):
            at, action, reason = found.interventions[0]
            lines.append(
                f"{found.task.name} in {found.task.family}, seed {found.task.seed}: {action} at {at}: {reason}"
            )
        return "\n".join(lines)


def tasks(split: Split, steps: int, first_seed: int = FIRST_SEED) -> Iterator[HealthyTask]:
    """Controls of this part, seed after seed, until they have so many healthy steps together."""
    taken, seed = 0, first_seed
    while taken < steps:
        for kind in CONTROLS.values():
            for one in kind.scenarios(split):
                if one.settings.seed == SEEDS[split][0]:
                    taken += one.settings.steps - one.onset
                    yield HealthyTask(kind.name, one.settings.family, split, seed)
        seed += 1


def run_task(task: HealthyTask) -> HealthyResult:
    """Make one run; up to its onset a control is its twin, and only what comes after is counted."""
    scenario = task.scenario
    with tempfile.TemporaryDirectory() as folder:
        train(scenario.run(), SurefootProtector(Path(folder), observe=False))
        events = [e for e in surefoot.read(folder).events if e["attempt"] >= scenario.onset]
    done = [e for e in events if e["kind"] == "decision" and e["applied"] and e["action"] != Action.RELAX]
    told = tuple((e["attempt"], str(e["action"]), str(e["reason"])) for e in done)
    return HealthyResult(
        task, scenario.settings.steps - scenario.onset, told, sum(e["kind"] == "finding" for e in events)
    )


def main(
    split: Split, *, steps: int, first_seed: int, workers: int, progress: Callable[[int, int], None]
) -> HealthyTally:
    """Run them all and count."""
    todo, tally = list(tasks(split, steps, first_seed)), HealthyTally(first_seed)
    for found in run_unordered(run_task, todo, workers):
        tally.add(found)
        progress(tally.runs, len(todo))
    return tally
