"""Scores of a rule: detection and its delay, the right cause, outcomes, false alarms."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

import surefoot
from benchmarks.zoo.jobs import SUREFOOT
from benchmarks.zoo.other_rules import ALARM_RULES
from benchmarks.zoo.scenario import TWIN, Scenario
from benchmarks.zoo.verify import HARM_RATIO
from surefoot.gate.clip import Clip, ClipUnit
from surefoot.gate.rule import NormRule, make_decider, new_gate_memory
from surefoot.judge.judge import Judge
from surefoot.judge.policy import Policy
from surefoot.measure.block_layout import UNITS_START, SummarySlot, VerdictSlot
from surefoot.records import Cause, Diagnosis, Finding, StepMetrics, Verdict

PER_STEPS = 100_000
"""False alarms are counted per this many healthy steps."""


@dataclass(frozen=True, slots=True)
class RuleReport:
    """What one rule reported on one recorded run."""

    alarms: tuple[int, ...]
    """Steps it raised an alarm at."""
    cause: Cause | None = None


def alarm_rules() -> dict[str, Callable[[Iterable[StepMetrics]], RuleReport]]:
    """Every alarm rule by name; surefoot first, which on zoo runs is scored by its journal: see `journal_report`."""

    def with_rule(make: Callable[[], object]) -> Callable[[Iterable[StepMetrics]], RuleReport]:
        def run_rule(rows: Iterable[StepMetrics]) -> RuleReport:
            rule: object = make()
            update = rule.update  # pyright: ignore[reportAttributeAccessIssue]
            return RuleReport(tuple(row.attempt for row in rows if update(row.loss, row.norm, row.lr)))

        return run_rule

    return {SUREFOOT: judge_published} | {make().name: with_rule(make) for make in ALARM_RULES}


def judge_published(rows: Iterable[StepMetrics]) -> RuleReport:
    """Surefoot's judge on published numbers."""
    judge = Judge(Policy(observe=True))
    alarms: list[int] = []
    cause: Cause | None = None
    for row in rows:
        events = judge.update(row)
        if any(isinstance(event, Finding) for event in events):
            alarms.append(row.attempt)
        cause = cause or next((event.cause for event in events if isinstance(event, Diagnosis)), None)
    return RuleReport(tuple(alarms), cause)


SYSTEM_CAUSES = (
    Cause.MEMORY_LEAK,
    Cause.DATA_STARVATION,
    Cause.LAUNCH_BOUND,
    Cause.SLOW_SAVING,
    Cause.SLOW_MACHINE,
)
"""Causes outside the run, such as a busy machine; they count as an answer only where one of them was planted."""


def journal_report(run_dir: Path, scenario: Scenario) -> RuleReport:
    """What surefoot's journal of a run reports, and the first cause it named from the onset on."""
    events = surefoot.read(run_dir).events
    alarms = sorted({e["attempt"] for e in events if e["kind"] == "finding"})
    diagnoses = (Cause(e["cause"]) for e in events if e["kind"] == "diagnosis" and e["attempt"] >= scenario.onset)
    causes = (cause for cause in diagnoses if cause not in SYSTEM_CAUSES or scenario.cause in SYSTEM_CAUSES)
    return RuleReport(tuple(alarms), next(causes, None))


def with_gate_verdicts(rows: Iterable[StepMetrics]) -> Iterator[StepMetrics]:
    """Published rows with the verdicts the gate would have given them."""
    policy = Policy()
    rule = NormRule(policy.max_norm_ratio, policy.warmup, policy.norm_max_decay)
    memory = new_gate_memory(0, [ClipUnit(0, slice(0, 1), Clip())], torch.device("cpu"))
    decide = make_decider(memory, rule)
    for row in rows:
        totals = torch.zeros(UNITS_START + 2, dtype=torch.float64)
        totals[SummarySlot.LOSS], totals[SummarySlot.ACTIVE_RANKS], totals[UNITS_START] = row.loss, 1.0, row.norm**2
        decision = torch.zeros(len(VerdictSlot), dtype=torch.float64)
        decide(totals, out=decision, scaled=False, joint=None, commit=True)
        yield replace(
            row, verdict=Verdict(int(decision[VerdictSlot.VERDICT])), norm_limit=float(decision[VerdictSlot.NORM_LIMIT])
        )


@dataclass(slots=True)
class DetectionScore:
    """How well an alarm rule detected a set of faulty runs."""

    runs: int = 0
    detected: int = 0
    delays: list[int] = field(default_factory=list)
    cause_named: int = 0
    """Runs for which it named a cause."""
    cause_right: int = 0

    def add(self, scenario: Scenario, report: RuleReport) -> None:
        first = next((step for step in report.alarms if step >= scenario.onset), None)
        self.runs += 1
        if first is not None:
            self.detected += 1
            self.delays.append(first - scenario.onset)
        self.cause_named += report.cause is not None
        self.cause_right += scenario.is_right_cause(report.cause)

    @property
    def share(self) -> float:
        return self.detected / self.runs if self.runs else math.nan

    @property
    def delay(self) -> float:
        return statistics.median(self.delays) if self.delays else math.nan


@dataclass(slots=True)
class FalseAlarmScore:
    """How often a rule raised an alarm, or intervened, where nothing was wrong."""

    steps: int = 0
    count: int = 0
    runs: int = 0
    runs_disturbed: int = 0
    """Runs with at least one."""

    def add(self, scenario: Scenario, steps: Iterable[int]) -> None:
        # Up to its onset a control is bit-equal to its twin, where those steps are counted.
        first = 0 if scenario.name == TWIN else scenario.onset
        alarms = sum(step >= first for step in steps)
        self.steps += scenario.settings.steps - first
        self.count += alarms
        self.runs += 1
        self.runs_disturbed += alarms > 0

    @property
    def rate(self) -> float:
        return PER_STEPS * self.count / self.steps if self.steps else math.nan


@dataclass(slots=True)
class OutcomeScore:
    """Final losses under a rule that intervenes, each relative to the fault-free twin's."""

    ratios: list[float] = field(default_factory=list)
    stopped: int = 0
    """Runs that the rule stopped."""

    def add(self, ratio: float, *, stopped: bool) -> None:
        self.ratios.append(ratio)
        self.stopped += stopped

    @property
    def share(self) -> float:
        """Share of runs that ended at most 5 % worse than their twin."""
        return _share(self.ratios, lambda r: r <= HARM_RATIO)

    @property
    def dead(self) -> float:
        """Share of runs whose model is broken at the end."""
        return _share(self.ratios, lambda r: not math.isfinite(r))

    @property
    def median_ratio(self) -> float:
        return statistics.median(self.ratios) if self.ratios else math.nan


def _share(values: Sequence[float], test: Callable[[float], bool]) -> float:
    return sum(map(test, values)) / len(values) if values else math.nan
