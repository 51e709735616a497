"""`surefoot bench zoo`: every rule against every planted fault and every healthy control, as one table.

Bare runs are made once, recorded, and shown to the rules that only look; rules that act run live. What was made is
kept and made again only when something it depends on has changed, so an interrupted bench goes on where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.worker_pool import run_unordered
from benchmarks.zoo import CONTROLS, FAULTS
from benchmarks.zoo.families import Split
from benchmarks.zoo.jobs import BARE, INTERVENTION_RULES, SUREFOOT, JobResult, ZooJob, scenarios_of
from benchmarks.zoo.scenario import SEEDS, Scenario
from benchmarks.zoo.scoreboard.tables import Scoreboard, score_all

Progress = Callable[[int, int, str], None]
"""Told how many runs are done, of how many, and which was the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which part of the zoo is run, and against whom."""

    split: Split = Split.REPORT
    only: str = ""
    """Only scenarios whose name contains this."""
    quick: bool = False
    """One brutal run of each cause and every twelfth control, and of those who act only surefoot."""

    seeds: int = 1
    """Seeds each scenario is run with; with one they take turns, so that all seeds of the part have theirs."""

    def scenarios(self) -> list[Scenario]:
        found = [s for s in scenarios_of(self.split) if self.only in s.id]
        if self.quick:
            return _quick_selection(found)
        if self.seeds >= len(SEEDS[self.split]):
            return found
        turn = {name: k for k, name in enumerate((*FAULTS, *CONTROLS))}
        return [s for s in found if s.settings.seed == SEEDS[self.split][turn[s.name] % len(SEEDS[self.split])]]

    def jobs(self, folder: Path) -> list[ZooJob]:
        """The bare runs first: what they show is needed by all."""
        scenarios = self.scenarios()
        twins = list({s.twin.id: s.twin for s in scenarios}.values())
        jobs = [ZooJob(s.id, BARE, str(folder)) for s in (*twins, *scenarios)]
        healthy = [s for s in scenarios if s.healthy] if self.quick else twins + [s for s in scenarios if s.healthy]
        live = [s for s in healthy if s.settings.ranks == 1] + [s for s in scenarios if s.harmful]
        jobs += [ZooJob(s.id, SUREFOOT, str(folder)) for s in live]
        if not self.quick:  # starting two processes takes longer than the run: only surefoot is tried there
            alone = [s for s in live if s.settings.ranks == 1]
            jobs += [ZooJob(s.id, judge, str(folder)) for judge in INTERVENTION_RULES for s in alone]
        return jobs


def _quick_selection(scenarios: Sequence[Scenario]) -> list[Scenario]:
    """A first look: each cause at its most brutal, and some controls; all in one process."""
    alone = [s for s in scenarios if s.settings.ranks == 1]
    causes: dict[str, Scenario] = {}
    controls: dict[str, Scenario] = {}
    for s in alone:
        if s.cause is not None and s.strength == "brutal":
            causes.setdefault(s.cause, s)
        elif s.healthy:
            controls.setdefault(s.name, s)
    return [*causes.values(), *list(controls.values())[::12]]


def run_jobs(jobs: Sequence[ZooJob], *, workers: int, progress: Progress) -> dict[tuple[str, str], JobResult]:
    """Do what has not been done before, in so many processes, and return what came of all."""
    results: dict[tuple[str, str], JobResult] = {}
    todo: list[ZooJob] = []
    for job in jobs:
        known = job.cached()
        if known is None:
            todo.append(job)
        else:
            results[job.id, job.judge] = known
    progress(len(results), len(jobs), "")
    for done in run_unordered(ZooJob.run, todo, workers):
        results[done.id, done.judge] = done
        progress(len(results), len(jobs), f"{done.judge}: {done.id}")
    return {(job.id, job.judge): results[job.id, job.judge] for job in jobs}  # in their order, whichever was known


def main(choice: Selection, *, folder: Path, workers: int, progress: Progress) -> Scoreboard:
    """Run what was chosen and score it."""
    scenarios = choice.scenarios()
    if not scenarios:
        raise ValueError(f"bench zoo: no scenario of the {choice.split} part contains {choice.only!r}")
    results = run_jobs(choice.jobs(folder), workers=workers, progress=progress)
    return score_all(scenarios, results, folder)
