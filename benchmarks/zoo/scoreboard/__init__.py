"""`surefoot bench zoo`: scores every rule on every planted fault and every healthy control.

Bare runs are recorded once and shown to the rules that only raise alarms; rules that intervene run live. Results are
cached until their sources change, so an interrupted benchmark resumes where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.worker_pool import run_unordered
from benchmarks.zoo import CONTROLS, FAULTS
from benchmarks.zoo.families import Split
from benchmarks.zoo.jobs import BARE, INTERVENTION_RULES, RULES_ALONE, SUREFOOT, JobResult, ZooJob, scenarios_of
from benchmarks.zoo.scenario import SEEDS, Scenario
from benchmarks.zoo.scoreboard.tables import Scoreboard, score_all

Progress = Callable[[int, int, str], None]
"""Called with the number of finished runs, the total, and the name of the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which scenarios are run, and under which rules."""

    split: Split = Split.REPORT
    only: str = ""
    """Only scenarios whose name contains this."""
    quick: bool = False
    """One brutal run of each cause and every twelfth control, bare and under surefoot only."""
    seeds: int = 1
    """Seeds per scenario; with 1 the scenarios alternate between the seeds of the split."""
    own: bool = False
    """Only the bare loop and surefoot with and without trials, not the loops of other projects."""

    def scenarios(self) -> list[Scenario]:
        scenarios = [s for s in scenarios_of(self.split) if self.only in s.id]
        if self.quick:
            return _quick_selection(scenarios)
        seeds = SEEDS[self.split]
        if self.seeds >= len(seeds):
            return scenarios
        number = {name: k for k, name in enumerate((*FAULTS, *CONTROLS))}
        return [s for s in scenarios if s.settings.seed == seeds[number[s.name] % len(seeds)]]

    def jobs(self, folder: Path) -> list[ZooJob]:
        """All jobs, the bare runs first: every score needs them."""
        scenarios = self.scenarios()
        twins = list({s.twin.id: s.twin for s in scenarios}.values())
        jobs = [ZooJob(s.id, BARE, str(folder)) for s in (*twins, *scenarios)]
        healthy = [s for s in scenarios if s.healthy] if self.quick else twins + [s for s in scenarios if s.healthy]
        live = [s for s in healthy if s.settings.ranks == 1] + [s for s in scenarios if s.harmful]
        jobs += [ZooJob(s.id, SUREFOOT, str(folder)) for s in live]
        if not self.quick:  # starting two processes takes longer than the run, so multi-rank runs get surefoot only
            single_rank = [s for s in live if s.settings.ranks == 1]
            judges = (RULES_ALONE,) if self.own else (RULES_ALONE, *INTERVENTION_RULES)
            jobs += [ZooJob(s.id, judge, str(folder)) for judge in judges for s in single_rank]
        return jobs


def _quick_selection(scenarios: Sequence[Scenario]) -> list[Scenario]:
    """Each cause at its most brutal, and some controls; single-rank only."""
    causes: dict[str, Scenario] = {}
    controls: dict[str, Scenario] = {}
    for s in scenarios:
        if s.settings.ranks > 1:
            continue
        if s.cause is not None and s.strength == "brutal":
            causes.setdefault(s.cause, s)
        elif s.healthy:
            controls.setdefault(s.name, s)
    return [*causes.values(), *list(controls.values())[::12]]


def run_jobs(jobs: Sequence[ZooJob], *, workers: int, progress: Progress) -> dict[tuple[str, str], JobResult]:
    """Run the jobs that have no cached result in worker processes and return all results in the order of the jobs."""
    results: dict[tuple[str, str], JobResult] = {}
    todo: list[ZooJob] = []
    for job in jobs:
        cached = job.cached()
        if cached is None:
            todo.append(job)
        else:
            results[job.id, job.judge] = cached
    progress(len(results), len(jobs), "")
    for result in run_unordered(ZooJob.run, todo, workers):
        results[result.id, result.judge] = result
        progress(len(results), len(jobs), f"{result.judge}: {result.id}")
    return {(job.id, job.judge): results[job.id, job.judge] for job in jobs}


def main(selection: Selection, *, folder: Path, workers: int, progress: Progress) -> Scoreboard:
    """Run the selected scenarios and score them."""
    scenarios = selection.scenarios()
    if not scenarios:
        raise ValueError(f"bench zoo: no scenario of the {selection.split} split contains {selection.only!r}")
    results = run_jobs(selection.jobs(folder), workers=workers, progress=progress)
    return score_all(scenarios, results, folder)
