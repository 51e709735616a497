"""Scores every rule on the results of all runs, and formats the scores as tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import surefoot
from benchmarks.zoo import FAULTS
from benchmarks.zoo.attached import recorded_rows
from benchmarks.zoo.jobs import BARE, RULES_ALONE, SUREFOOT, JobResult, ZooJob
from benchmarks.zoo.published_runs import PRELUDE_STEPS, PUBLISHED_RUNS, PublishedRun, rule_inputs
from benchmarks.zoo.published_runs import rows as run_rows
from benchmarks.zoo.scenario import STRENGTHS, Scenario
from benchmarks.zoo.scoreboard.scores import (
    DetectionScore,
    FalseAlarmScore,
    OutcomeScore,
    RuleReport,
    alarm_rules,
    journal_report,
    with_gate_verdicts,
)
from benchmarks.zoo.scoreboard.trial_table import TRIALS, first_causes, trial_rows
from benchmarks.zoo.verify import is_harmed
from surefoot.records import StepMetrics, Verdict

ALL = "all"
HARMLESS = "harmless"
REGRET = 0.02
"""A run that ends this fraction above the same run bare is worse for being protected."""


@dataclass(slots=True)
class AlarmScores:
    """The scores of a rule that only raises alarms."""

    detection: dict[str, DetectionScore] = field(default_factory=dict)
    """Harmful faults by strength, area, kind and model family; harmless ones under `HARMLESS`."""
    false_alarms: FalseAlarmScore = field(default_factory=FalseAlarmScore)
    false_alarms_by_family: dict[str, FalseAlarmScore] = field(default_factory=dict)
    published_runs: dict[str, RuleReport] = field(default_factory=dict)


@dataclass(slots=True)
class InterventionScores:
    """The scores of a rule that intervenes, and of the bare loop."""

    outcomes: dict[str, OutcomeScore] = field(default_factory=dict)
    false_interventions: FalseAlarmScore = field(default_factory=FalseAlarmScore)
    false_interventions_by_family: dict[str, FalseAlarmScore] = field(default_factory=dict)
    healthy_outcomes: OutcomeScore = field(default_factory=OutcomeScore)
    """Healthy runs under the rule, relative to the same runs bare."""
    compared: int = 0
    """Runs compared with the same run bare, harmful or healthy."""
    worse: list[str] = field(default_factory=list)
    """Those that end more than `REGRET` worse, with both losses."""


@dataclass(slots=True)
class Scoreboard:
    """All scores of one benchmark."""

    scenarios: Sequence[Scenario]
    results: Mapping[tuple[str, str], JobResult]
    folder: Path
    alarms: dict[str, AlarmScores] = field(default_factory=dict)
    interventions: dict[str, InterventionScores] = field(default_factory=dict)
    not_as_stated: list[str] = field(default_factory=list)
    overflow_steps: dict[str, frozenset[int]] = field(default_factory=dict)
    """Steps of each healthy run that loss scaling skips anyway: an intervention there changes nothing."""

    def worse_than_bare(self, judge: str) -> Sequence[str]:
        return self.interventions[judge].worse if judge in self.interventions else ()

    def ratio(self, scenario: Scenario, judge: str) -> float:
        """Final loss under a judge relative to the bare fault-free twin."""
        return self.results[scenario.id, judge].loss / self.results[scenario.twin.id, BARE].loss


def score_all(scenarios: Sequence[Scenario], results: Mapping[tuple[str, str], JobResult], folder: Path) -> Scoreboard:
    """Score every rule on every run."""
    board = Scoreboard(scenarios, results, folder)
    twins = list({s.twin.id: s.twin for s in scenarios}.values())
    all_runs = [*twins, *scenarios]
    for name, run_rule in alarm_rules().items():
        scores = board.alarms[name] = AlarmScores()
        for published in PUBLISHED_RUNS:
            rows = published_rows(published)
            scores.published_runs[published.name] = run_rule(with_gate_verdicts(rows) if name == SUREFOOT else rows)
    for scenario in all_runs:
        rows = list(recorded_rows(ZooJob(scenario.id, BARE, str(folder)).run_dir))
        if scenario.healthy:
            board.overflow_steps[scenario.id] = frozenset(r.attempt for r in rows if r.verdict is Verdict.OVERFLOW)
        for name, run_rule in alarm_rules().items():
            # surefoot is scored by its journal of the run it protected, or of the bare run where it only observed
            job = ZooJob(scenario.id, SUREFOOT if (scenario.id, SUREFOOT) in results else BARE, str(folder))
            report = journal_report(job.run_dir, scenario) if name == SUREFOOT else run_rule(rows)
            _add_report(board.alarms[name], scenario, report)
    for judge in dict.fromkeys(judge for _, judge in results):
        board.interventions[judge] = InterventionScores()
        for scenario in all_runs:
            if (scenario.id, judge) in results:
                _add_outcome(board, judge, scenario)
    board.not_as_stated = list(_unmet_statements(board))
    return board


def published_rows(run: PublishedRun) -> list[StepMetrics]:
    """A published run as the rules see it."""
    return [replace(row, norm=norm) for row, (_, norm, _) in zip(run_rows(run), rule_inputs(run), strict=True)]


def _score_keys(scenario: Scenario) -> tuple[str, ...]:
    """The keys under which a fault is counted."""
    if not scenario.harmful:
        return (HARMLESS,)
    group = FAULTS[scenario.name].group
    return (ALL, scenario.strength, group, scenario.settings.family, scenario.name)


def _add_report(scores: AlarmScores, scenario: Scenario, report: RuleReport) -> None:
    if scenario.healthy:
        by_family = scores.false_alarms_by_family.setdefault(scenario.settings.family, FalseAlarmScore())
        for score in (scores.false_alarms, by_family):
            score.add(scenario, report.alarms)
        return
    for key in _score_keys(scenario):
        scores.detection.setdefault(key, DetectionScore()).add(scenario, report)


def _add_outcome(board: Scoreboard, judge: str, scenario: Scenario) -> None:
    scores, result = board.interventions[judge], board.results[scenario.id, judge]
    bare = board.results[scenario.id, BARE].loss
    scores.compared += 1
    if not result.loss <= (1.0 + REGRET) * bare:
        scores.worse.append(f"{scenario.id} ({result.loss / bare:.3f} of the bare run's loss)")
    if scenario.healthy:
        acted = [step for step in result.acted if step not in board.overflow_steps[scenario.id]]
        by_family = scores.false_interventions_by_family.setdefault(scenario.settings.family, FalseAlarmScore())
        for score in (scores.false_interventions, by_family):
            score.add(scenario, acted)
        scores.healthy_outcomes.add(result.loss / bare, stopped=result.stopped is not None)
        return
    if not scenario.curable or (scenario.id, SUREFOOT) not in board.results:
        return  # the bare loop is scored on the same runs as the others
    single_rank = scenario.settings.ranks == 1  # with several ranks only surefoot is run
    for key in _score_keys(scenario) if single_rank else (FAULTS[scenario.name].group, scenario.name):
        stopped = result.stopped is not None
        scores.outcomes.setdefault(key, OutcomeScore()).add(board.ratio(scenario, judge), stopped=stopped)


def _unmet_statements(board: Scoreboard) -> Iterator[str]:
    """Messages for scenarios whose bare run contradicts what they state."""
    for scenario in board.scenarios:
        ratio = board.ratio(scenario, BARE)
        if scenario.healthy:
            if not math.isfinite(ratio):
                yield f"{scenario.id} is stated healthy, but its model broke"
            continue
        if is_harmed(ratio) != scenario.harmful:
            stated = "harmful" if scenario.harmful else "harmless"
            yield f"{scenario.id} is stated {stated}, but its final loss is {ratio:.3f} of its twin's"
        if not _absent_before_onset(board, scenario):
            yield f"{scenario.id} differs from its twin before its onset"


def _absent_before_onset(board: Scoreboard, scenario: Scenario) -> bool:
    """Whether losses and norms before the onset are bit-equal to the twin's."""
    return _rows_before(board, scenario, scenario.onset) == _rows_before(board, scenario.twin, scenario.onset)


def _rows_before(board: Scoreboard, scenario: Scenario, onset: int) -> list[bytes]:
    scalars = surefoot.read(ZooJob(scenario.id, BARE, str(board.folder)).run_dir).scalars
    before = scalars["attempt"] < onset
    return [scalars[name][before].tobytes() for name in ("loss", "norm", "lr", "loss_scale")]


# -- the tables


_PUBLISHED = "The first alarm, in published steps before (-) or after (+) the undisputed spike."


def tables(board: Scoreboard) -> str:
    """All tables as Markdown."""
    parts = [
        _summary(board),
        "## Rules that raise alarms\n\n" + _table(_alarm_rows(board)),
        "## Rules that intervene\n\n" + _table(_intervention_rows(board)),
        *(f"## {head}\n\n{_table(_breakdown_rows(board, keys))}" for head, keys in _breakdowns(board)),
        f"## Published runs\n\n{_PUBLISHED}\n\n{_table(_published_rows(board))}",
    ]
    worse = [f"- {name}: {line}" for name in (SUREFOOT, RULES_ALONE) for line in board.worse_than_bare(name)]
    if worse:
        parts.append("## Worse than the bare run\n\n" + "\n".join(worse))
    trials = list(trial_rows(board.scenarios, board.results, board.folder))
    if len(trials) > 1:
        causes = first_causes(board.scenarios, board.results, board.folder)
        parts.append(f"## Trials\n\n{TRIALS}\n\n{_table(iter(trials))}\n\n{causes}")
    if board.not_as_stated:
        parts.append("## Not as stated\n\n" + "\n".join(f"- {line}" for line in board.not_as_stated))
    return "\n\n".join(parts)


def _summary(board: Scoreboard) -> str:
    faults = [s for s in board.scenarios if not s.healthy]
    kinds = len({s.name for s in faults})
    harmful = sum(s.harmful for s in faults)
    controls = [s for s in board.scenarios if s.healthy]
    steps = board.alarms[SUREFOOT].false_alarms.steps
    return (
        f"{len(faults)} runs with a planted fault ({kinds} kinds, {harmful} harmful), {len(controls)} healthy controls "
        f"({len({s.name for s in controls})} kinds), {steps:,} healthy steps."
    )


def _alarm_rows(board: Scoreboard) -> Iterator[Sequence[str]]:
    yield ("rule", "detected", *STRENGTHS, "steps after onset", "cause right", "harmless detected", "false findings")
    for name, scores in board.alarms.items():
        total = scores.detection.get(ALL, DetectionScore())
        cause = f"{total.cause_right / total.runs:.0%}" if total.cause_named else "-"
        yield (
            name,
            _percent(total.share),
            *(_percent(scores.detection.get(strength, DetectionScore()).share) for strength in STRENGTHS),
            _number(total.delay),
            cause,
            _percent(scores.detection.get(HARMLESS, DetectionScore()).share),
            _number(scores.false_alarms.rate),
        )


def _intervention_rows(board: Scoreboard) -> Iterator[Sequence[str]]:
    yield (
        *("loop", "cured", *STRENGTHS, "loss / twin's", "broken", "stopped"),
        *("worse than bare", "false interventions", "healthy harmed"),
    )
    for judge, scores in board.interventions.items():
        total = scores.outcomes.get(ALL, OutcomeScore())
        yield (
            judge,
            _percent(total.share),
            *(_percent(scores.outcomes.get(strength, OutcomeScore()).share) for strength in STRENGTHS),
            _number(total.median_ratio, 3),
            _percent(total.dead),
            str(total.stopped),
            f"{len(scores.worse)} of {scores.compared}",
            _number(scores.false_interventions.rate),
            _percent(1 - scores.healthy_outcomes.share),
        )


def _breakdowns(board: Scoreboard) -> Iterator[tuple[str, Sequence[str]]]:
    yield "By area of the fault", list(dict.fromkeys(k.group for k in FAULTS.values()))
    yield "By model", list(dict.fromkeys(s.settings.family for s in board.scenarios))


def _breakdown_rows(board: Scoreboard, keys: Sequence[str]) -> Iterator[Sequence[str]]:
    """Detection, outcomes and false alarms of every rule, one column per key."""
    yield ("harmful runs", *keys)
    runs = board.alarms[SUREFOOT].detection
    yield ("count", *(str(runs.get(key, DetectionScore()).runs) for key in keys))
    for name, scores in board.alarms.items():
        cells = (_detection_cell(scores.detection.get(key, DetectionScore())) for key in keys)
        yield (f"{name}: detected, after", *cells)
    for judge, scores in board.interventions.items():
        cells = (_outcome_cell(scores.outcomes.get(key, OutcomeScore())) for key in keys)
        yield (f"{judge}: end well, loss", *cells)
    for name, scores in board.alarms.items():
        if scores.false_alarms_by_family.keys() & set(keys):
            rates = (scores.false_alarms_by_family.get(key, FalseAlarmScore()).rate for key in keys)
            yield (f"{name}: false findings", *map(_number, rates))
    for judge, scores in board.interventions.items():
        if scores.false_interventions_by_family.keys() & set(keys):
            rates = (scores.false_interventions_by_family.get(key, FalseAlarmScore()).rate for key in keys)
            yield (f"{judge}: false interventions", *map(_number, rates))


def _detection_cell(score: DetectionScore) -> str:
    """Share detected, median steps after the onset, and the share with the right cause where causes are named."""
    parts = [_percent(score.share), _number(score.delay)] if score.detected else [_percent(score.share)]
    return ", ".join([*parts, f"cause {score.cause_right / score.runs:.0%}"] if score.cause_named else parts)


def _outcome_cell(score: OutcomeScore) -> str:
    """Share that ended well, and the median final loss relative to the twin's."""
    return f"{_percent(score.share)}, {_number(score.median_ratio, 2)}" if score.ratios else "-"


def _published_rows(board: Scoreboard) -> Iterator[Sequence[str]]:
    yield ("run", "published as", *board.alarms)
    for run in PUBLISHED_RUNS:
        cells = (_first_alarm_cell(run, scores.published_runs[run.name]) for scores in board.alarms.values())
        yield (run.name, "healthy" if run.healthy else "trouble", *cells)


def _first_alarm_cell(run: PublishedRun, report: RuleReport) -> str:
    if run.healthy:
        return "false" if report.alarms else "silent"
    early = any(step < PRELUDE_STEPS for step in report.alarms)
    first = next((step - PRELUDE_STEPS - run.spike for step in report.alarms if step >= PRELUDE_STEPS), None)
    return ("missed" if first is None else f"{first:+d}") + (" (and false before)" if early else "")


def _table(lines: Iterator[Sequence[str]]) -> str:
    head, *body = lines
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *body))


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.0%}"


def _number(value: float, digits: int = 0) -> str:
    return "-" if math.isnan(value) else f"{value:,.{digits}f}"


def as_data(board: Scoreboard) -> dict[str, Any]:
    """The scores as JSON values; null where nothing was measured."""

    def plain(value: float) -> float | None:
        return value if math.isfinite(value) else None

    alarms = {
        name: {
            "seen": {
                key: {"runs": s.runs, "share": plain(s.share), "delay": plain(s.delay), "cause_right": s.cause_right}
                for key, s in scores.detection.items()
            },
            "false_findings": plain(scores.false_alarms.rate),
        }
        for name, scores in board.alarms.items()
    }
    interventions = {
        judge: {
            "cured": {
                key: {
                    "runs": len(c.ratios),
                    "share": plain(c.share),
                    "loss_to_twin": plain(c.median_ratio),
                    "dead": c.dead,
                }
                for key, c in scores.outcomes.items()
            },
            "false_interventions": plain(scores.false_interventions.rate),
            "healthy_harmed": plain(1 - scores.healthy_outcomes.share),
        }
        for judge, scores in board.interventions.items()
    }
    return {"looking": alarms, "acting": interventions, "not_as_stated": board.not_as_stated}
