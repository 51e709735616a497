"""How often a rule is right: what it saw and how soon, what it cured, and how often it cried wolf."""

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
from surefoot.gate.clip import Clip, Unit
from surefoot.gate.rule import NormRule, VerdictSlot, decider_for, memory_for
from surefoot.judge.judge import Judge
from surefoot.judge.policy import Policy
from surefoot.measure.block_layout import HEAD, SummarySlot
from surefoot.records import Cause, Diagnosis, Finding, StepMetrics, Verdict

PER_STEPS = 100_000
"""False alarms are told per this many healthy steps."""


@dataclass(frozen=True, slots=True)
class RuleReport:
    """What one rule said of one recorded run."""

    alarms: tuple[int, ...]
    """Steps it raised an alarm at."""
    cause: Cause | None = None


def alarm_rules() -> dict[str, Callable[[Iterable[StepMetrics]], RuleReport]]:
    """Every rule that looks, by name; ours first, which in the zoo is not asked but read: see `told`."""

    def with_rule(make: Callable[[], object]) -> Callable[[Iterable[StepMetrics]], RuleReport]:
        def look(rows: Iterable[StepMetrics]) -> RuleReport:
            rule: object = make()
            update = rule.update  # pyright: ignore[reportAttributeAccessIssue]
            return RuleReport(tuple(row.attempt for row in rows if update(row.loss, row.norm, row.lr)))

        return look

    return {SUREFOOT: judge_published} | {make().name: with_rule(make) for make in ALARM_RULES}


def judge_published(rows: Iterable[StepMetrics]) -> RuleReport:
    """The judge as it stands, on numbers that were published."""
    judge = Judge(Policy(observe=True))
    alarms: list[int] = []
    cause: Cause | None = None
    for row in rows:
        events = judge.update(row)
        if any(isinstance(event, Finding) for event in events):
            alarms.append(row.attempt)
        cause = cause or next((event.cause for event in events if isinstance(event, Diagnosis)), None)
    return RuleReport(tuple(alarms), cause)


SYSTEM_CAUSES = (Cause.MEMORY_LEAK, Cause.DATA_STARVATION)
"""Trouble of the machine, which is told apart from the run's: a busy machine is no answer to what was planted."""


def journal_report(run_dir: Path, scenario: Scenario) -> RuleReport:
    """What surefoot said in a run's own journal, and the first cause it named from the onset on."""
    events = surefoot.read(run_dir).events
    alarms = sorted({e["attempt"] for e in events if e["kind"] == "finding"})
    since = (Cause(e["cause"]) for e in events if e["kind"] == "diagnosis" and e["attempt"] >= scenario.onset)
    named = (cause for cause in since if cause not in SYSTEM_CAUSES or scenario.cause in SYSTEM_CAUSES)
    return RuleReport(tuple(alarms), next(named, None))


def with_gate_verdicts(rows: Iterable[StepMetrics]) -> Iterator[StepMetrics]:
    """Rows that were only published, with the verdict the gate would have given on them."""
    policy, home = Policy(), torch.device("cpu")
    rule = NormRule(policy.max_norm_ratio, policy.warmup, policy.norm_max_decay)
    memory = memory_for(0, [Unit(0, slice(0, 1), Clip())], home)
    decide = decider_for(memory, rule)
    for row in rows:
        totals = torch.zeros(HEAD + 2, dtype=torch.float64)
        totals[SummarySlot.LOSS], totals[SummarySlot.ALIVE], totals[HEAD] = row.loss, 1.0, row.norm**2
        said = torch.zeros(len(VerdictSlot), dtype=torch.float64)
        decide(totals, said=said, scaled=False, joint=None, commit=True)
        yield replace(row, verdict=Verdict(int(said[VerdictSlot.VERDICT])), norm_limit=float(said[VerdictSlot.LIMIT]))


@dataclass(slots=True)
class DetectionScore:
    """How well a rule that looks saw a set of broken runs."""

    runs: int = 0
    detected: int = 0
    delays: list[int] = field(default_factory=list)
    cause_named: int = 0
    """Runs it named a cause for."""
    cause_right: int = 0

    def add(self, scenario: Scenario, look: RuleReport) -> None:
        first = next((at for at in look.alarms if at >= scenario.onset), None)
        self.runs += 1
        if first is not None:
            self.detected += 1
            self.delays.append(first - scenario.onset)
        self.cause_named += look.cause is not None
        self.cause_right += scenario.is_right_cause(look.cause)

    @property
    def share(self) -> float:
        return self.detected / self.runs if self.runs else math.nan

    @property
    def delay(self) -> float:
        return statistics.median(self.delays) if self.delays else math.nan


@dataclass(slots=True)
class FalseAlarmScore:
    """How often a rule spoke, or acted, where nothing was wrong."""

    steps: int = 0
    count: int = 0
    runs: int = 0
    runs_disturbed: int = 0
    """Runs in which it did so at all."""

    def add(self, scenario: Scenario, steps: Iterable[int]) -> None:
        # Up to its onset a control is the twin of its settings, bit for bit: those steps are counted there.
        begin = 0 if scenario.name == TWIN else scenario.onset
        spoke = sum(1 for at in steps if at >= begin)
        self.steps += scenario.settings.steps - begin
        self.count += spoke
        self.runs += 1
        self.runs_disturbed += spoke > 0

    @property
    def rate(self) -> float:
        return PER_STEPS * self.count / self.steps if self.steps else math.nan


@dataclass(slots=True)
class OutcomeScore:
    """How runs ended under a rule that acts, each as a ratio to its fault-free twin."""

    ratios: list[float] = field(default_factory=list)
    stopped: int = 0
    """Runs it gave up."""

    def add(self, ratio: float, *, stopped: bool) -> None:
        self.ratios.append(ratio)
        self.stopped += stopped

    @property
    def share(self) -> float:
        """Share of the runs that ended at most 5 % worse than their twin."""
        return _share(self.ratios, lambda r: r <= HARM_RATIO)

    @property
    def dead(self) -> float:
        """Share of the runs whose model is broken at the end."""
        return _share(self.ratios, lambda r: not math.isfinite(r))

    @property
    def median_ratio(self) -> float:
        return statistics.median(self.ratios) if self.ratios else math.nan


def _share(values: Sequence[float], test: Callable[[float], bool]) -> float:
    return sum(map(test, values)) / len(values) if values else math.nan
