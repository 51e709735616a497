"""`surefoot bench healthy`: trains the zoo's healthy controls with new seeds and counts surefoot's interventions."""

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
from surefoot.trials.conclusion import TrialResult

FIRST_SEED = 20_000
"""Seeds from here on are unused elsewhere: nothing was tuned on them or reported from them in `bench zoo`."""


@dataclass(frozen=True, slots=True)
class HealthyTask:
    """One healthy control with its own seed."""

    name: str
    family: str
    split: Split
    seed: int

    @property
    def scenario(self) -> Scenario:
        scenarios = (s for s in CONTROLS[self.name].scenarios(self.split) if s.settings.family == self.family)
        scenario = next(s for s in scenarios if s.settings.seed == SEEDS[self.split][0])
        return replace(scenario, settings=replace(scenario.settings, seed=self.seed))


@dataclass(frozen=True, slots=True)
class HealthyResult:
    """Surefoot's interventions and findings in one healthy run."""

    task: HealthyTask
    steps: int
    interventions: tuple[tuple[int, str, str], ...]
    """Attempt, action and reason of each intervention."""
    findings: int
    trials: int


@dataclass(slots=True)
class HealthyTally:
    first_seed: int = FIRST_SEED
    steps: int = 0
    runs: int = 0
    findings: int = 0
    trials: int = 0
    touched: list[HealthyResult] = field(default_factory=list)

    def add(self, result: HealthyResult) -> None:
        self.runs += 1
        self.steps += result.steps
        self.findings += result.findings
        self.trials += result.trials
        if result.interventions:
            self.touched.append(result)

    @property
    def interventions(self) -> int:
        return sum(len(result.interventions) for result in self.touched)

    def as_text(self) -> str:
        findings_rate = 1e5 * self.findings / max(self.steps, 1)
        interventions = f"{self.interventions} interventions in {len(self.touched)} runs"
        runs = f"{self.runs} healthy runs with seeds from {self.first_seed} on, {self.steps:,} steps"
        trials = f"{self.trials} trials"
        lines = [f"{runs}: {interventions}, {trials}, {findings_rate:.0f} findings per 100,000 steps."]
        if not self.touched:
            lines.append(f"With 95 % confidence: fewer than {3e5 / max(self.steps, 1):.2f} in 100,000 steps.")
        for result in sorted(self.touched, key=lambda result: (result.task.seed, result.task.name, result.task.family)):
            task, (attempt, action, reason) = result.task, result.interventions[0]
            lines.append(f"{task.name} in {task.family}, seed {task.seed}: {action} at attempt {attempt}: {reason}")
        return "\n".join(lines)


def tasks(split: Split, steps: int, first_seed: int = FIRST_SEED) -> Iterator[HealthyTask]:
    """The controls of a split, seed after seed, until they have this many healthy steps in total."""
    total_steps, seed = 0, first_seed
    while total_steps < steps:
        for kind in CONTROLS.values():
            for scenario in kind.scenarios(split):
                if scenario.settings.seed == SEEDS[split][0]:
                    total_steps += scenario.settings.steps - scenario.onset
                    yield HealthyTask(kind.name, scenario.settings.family, split, seed)
        seed += 1


def run_task(task: HealthyTask) -> HealthyResult:
    """Train one run; only steps from its onset on count, since up to there a control equals its twin."""
    scenario = task.scenario
    with tempfile.TemporaryDirectory() as folder:
        train(scenario.run(), SurefootProtector(Path(folder), observe=False))
        events = [e for e in surefoot.read(folder).events if e["attempt"] >= scenario.onset]
    decisions = [e for e in events if e["kind"] == "decision" and e["applied"] and e["action"] != Action.RELAX]
    interventions = tuple((e["attempt"], str(e["action"]), str(e["reason"])) for e in decisions)
    return HealthyResult(
        task,
        scenario.settings.steps - scenario.onset,
        interventions,
        findings=sum(e["kind"] == "finding" for e in events),
        trials=sum(e["kind"] == "trial" and e["result"] != TrialResult.NOT_RUN for e in events),
    )


def main(
    split: Split, *, steps: int, first_seed: int, workers: int, progress: Callable[[int, int], None]
) -> HealthyTally:
    """Run all tasks and count the interventions."""
    todo, tally = list(tasks(split, steps, first_seed)), HealthyTally(first_seed)
    for result in run_unordered(run_task, todo, workers):
        tally.add(result)
        progress(tally.runs, len(todo))
    return tally
