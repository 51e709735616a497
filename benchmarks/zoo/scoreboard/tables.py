"""The scoreboard: results of all runs turned into figures for each rule, and those into tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import surefoot
from benchmarks.zoo import FAULTS
from benchmarks.zoo.attached import recorded_rows
from benchmarks.zoo.jobs import BARE, SUREFOOT, JobResult, ZooJob
from benchmarks.zoo.published_runs import PRELUDE_STEPS, PUBLISHED_RUNS, PublishedRun, rule_inputs
from benchmarks.zoo.published_runs import rows as trace_rows
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
from benchmarks.zoo.verify import is_harmed
from surefoot.records import StepMetrics, Verdict

ALL = "all"
HARMLESS = "harmless"


@dataclass(slots=True)
class AlarmScores:
    """The figures of a rule that looks."""

    detection: dict[str, DetectionScore] = field(default_factory=dict)
    """By strength, by group of faults, by kind and by model family; harmful faults, the harmless ones apart."""
    false_alarms: FalseAlarmScore = field(default_factory=FalseAlarmScore)
    false_alarms_by_family: dict[str, FalseAlarmScore] = field(default_factory=dict)
    """The same by model family."""
    published_runs: dict[str, RuleReport] = field(default_factory=dict)


@dataclass(slots=True)
class InterventionScores:
    """The figures of a rule that acts; of the bare loop too."""

    outcomes: dict[str, OutcomeScore] = field(default_factory=dict)
    false_interventions: FalseAlarmScore = field(default_factory=FalseAlarmScore)
    false_interventions_by_family: dict[str, FalseAlarmScore] = field(default_factory=dict)
    healthy_outcomes: OutcomeScore = field(default_factory=OutcomeScore)
    """Healthy runs under its hands, against the same runs bare."""


@dataclass(slots=True)
class Scoreboard:
    """All figures of one bench."""

    scenarios: Sequence[Scenario]
    results: Mapping[tuple[str, str], JobResult]
    folder: Path
    alarms: dict[str, AlarmScores] = field(default_factory=dict)
    interventions: dict[str, InterventionScores] = field(default_factory=dict)
    not_as_stated: list[str] = field(default_factory=list)
    overflow_steps: dict[str, frozenset[int]] = field(default_factory=dict)
    """Steps of each healthy run that loss scaling left out by itself: who acts there changes nothing."""

    def ratio(self, scenario: Scenario, judge: str) -> float:
        """Final loss under a judge against the bare fault-free twin."""
        return self.results[scenario.id, judge].loss / self.results[scenario.twin.id, BARE].loss


def score_all(scenarios: Sequence[Scenario], results: Mapping[tuple[str, str], JobResult], folder: Path) -> Scoreboard:
    """Score every rule on every run."""
    board = Scoreboard(scenarios, results, folder)
    twins = list({s.twin.id: s.twin for s in scenarios}.values())
    everyone = [*twins, *scenarios]
    for name, look in alarm_rules().items():
        figures = board.alarms[name] = AlarmScores()
        for trace in PUBLISHED_RUNS:
            rows = published_rows(trace)
            figures.published_runs[trace.name] = look(with_gate_verdicts(rows) if name == SUREFOOT else rows)
    for scenario in everyone:
        rows = list(recorded_rows(ZooJob(scenario.id, BARE, str(folder)).run_dir))
        if scenario.healthy:
            board.overflow_steps[scenario.id] = frozenset(r.attempt for r in rows if r.verdict is Verdict.OVERFLOW)
        for name, look in alarm_rules().items():
            # surefoot is judged by what it said where it stood by, and where it only observed by what it said there
            stood_by = ZooJob(scenario.id, SUREFOOT if (scenario.id, SUREFOOT) in results else BARE, str(folder))
            saw = journal_report(stood_by.run_dir, scenario) if name == SUREFOOT else look(rows)
            _add_report(board.alarms[name], scenario, saw)
    for judge in dict.fromkeys(judge for _, judge in results):
        board.interventions[judge] = InterventionScores()
        for scenario in everyone:
            if (scenario.id, judge) in results:
                _add_outcome(board, judge, scenario)
    board.not_as_stated = list(_unmet_statements(board))
    return board


def published_rows(trace: PublishedRun) -> list[StepMetrics]:
    """A public run as rules are shown it."""
    return [replace(row, norm=norm) for row, (_, norm, _) in zip(trace_rows(trace), rule_inputs(trace), strict=True)]


def _score_keys(scenario: Scenario) -> tuple[str, ...]:
    """Under which headings a fault is counted."""
    if not scenario.harmful:
        return (HARMLESS,)
    group = FAULTS[scenario.name].group
    return (ALL, scenario.strength, group, scenario.settings.family, scenario.name)


def _add_report(figures: AlarmScores, scenario: Scenario, look: RuleReport) -> None:
    if scenario.healthy:
        for wolf in (
            figures.false_alarms,
            figures.false_alarms_by_family.setdefault(scenario.settings.family, FalseAlarmScore()),
        ):
            wolf.add(scenario, look.alarms)
        return
    for place in _score_keys(scenario):
        figures.detection.setdefault(place, DetectionScore()).add(scenario, look)


def _add_outcome(board: Scoreboard, judge: str, scenario: Scenario) -> None:
    figures, result = board.interventions[judge], board.results[scenario.id, judge]
    if scenario.healthy:
        acted = [at for at in result.acted if at not in board.overflow_steps[scenario.id]]
        for wolf in (
            figures.false_interventions,
            figures.false_interventions_by_family.setdefault(scenario.settings.family, FalseAlarmScore()),
        ):
            wolf.add(scenario, acted)
        bare = board.results[scenario.id, BARE].loss
        figures.healthy_outcomes.add(result.loss / bare, stopped=result.stopped is not None)
        return
    if not scenario.curable or (scenario.id, SUREFOOT) not in board.results:
        return  # the bare loop is compared on the runs that others were tried on
    alone = scenario.settings.ranks == 1  # where there are more, not everyone was tried
    for place in _score_keys(scenario) if alone else (FAULTS[scenario.name].group, scenario.name):
        stopped = result.stopped is not None
        figures.outcomes.setdefault(place, OutcomeScore()).add(board.ratio(scenario, judge), stopped=stopped)


def _unmet_statements(board: Scoreboard) -> Iterator[str]:
    """What a scenario states of itself and the bare run shows otherwise."""
    for scenario in board.scenarios:
        ratio = board.ratio(scenario, BARE)
        if scenario.healthy:
            if not math.isfinite(ratio):
                yield f"{scenario.id} is stated healthy and died"
            continue
        if is_harmed(ratio) != scenario.harmful:
            said = "harmful" if scenario.harmful else "harmless"
            yield f"{scenario.id} is stated {said} and ended at {ratio:.3f} of its twin"
        if not _absent_before_onset(board, scenario):
            yield f"{scenario.id} differs from its twin before its onset"


def _absent_before_onset(board: Scoreboard, scenario: Scenario) -> bool:
    """Whether losses and norms up to the onset are those of the twin, bit for bit."""
    mine, twins = (_rows_before(board, one, scenario.onset) for one in (scenario, scenario.twin))
    return mine == twins


def _rows_before(board: Scoreboard, scenario: Scenario, onset: int) -> list[bytes]:
    scalars = surefoot.read(ZooJob(scenario.id, BARE, str(board.folder)).run_dir).scalars
    before = scalars["attempt"] < onset
    return [scalars[name][before].tobytes() for name in ("loss", "norm", "lr", "loss_scale")]


# -- the tables


_TRACES = "The first alarm, in published steps before (-) or after (+) the one that is beyond dispute."


def tables(board: Scoreboard) -> str:
    """Everything, as Markdown."""
    parts = [
        _summary(board),
        "## Rules that look\n\n" + _table(_alarm_rows(board)),
        "## Rules that act\n\n" + _table(_intervention_rows(board)),
        *(f"## {head}\n\n{_table(_breakdown_rows(board, places))}" for head, places in _breakdowns(board)),
        f"## Public runs\n\n{_TRACES}\n\n{_table(_published_rows(board))}",
    ]
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
    yield ("rule", "seen", *STRENGTHS, "steps after onset", "cause right", "harmless seen", "false findings")
    for name, figures in board.alarms.items():
        whole = figures.detection.get(ALL, DetectionScore())
        cause = f"{whole.cause_right / whole.runs:.0%}" if whole.cause_named else "-"
        yield (
            name,
            _percent(whole.share),
            *(_percent(figures.detection.get(strength, DetectionScore()).share) for strength in STRENGTHS),
            _number(whole.delay),
            cause,
            _percent(figures.detection.get(HARMLESS, DetectionScore()).share),
            _number(figures.false_alarms.rate),
        )


def _intervention_rows(board: Scoreboard) -> Iterator[Sequence[str]]:
    yield ("loop", "cured", *STRENGTHS, "loss to twin's", "dead", "given up", "false interventions", "healthy harmed")
    for judge, figures in board.interventions.items():
        whole = figures.outcomes.get(ALL, OutcomeScore())
        yield (
            judge,
            _percent(whole.share),
            *(_percent(figures.outcomes.get(strength, OutcomeScore()).share) for strength in STRENGTHS),
            _number(whole.median_ratio, 3),
            _percent(whole.dead),
            str(whole.stopped),
            _number(figures.false_interventions.rate),
            _percent(1 - figures.healthy_outcomes.share),
        )


def _breakdowns(board: Scoreboard) -> Iterator[tuple[str, Sequence[str]]]:
    yield "By what is wrong", list(dict.fromkeys(k.group for k in FAULTS.values()))
    yield "By model", list(dict.fromkeys(s.settings.family for s in board.scenarios))


def _breakdown_rows(board: Scoreboard, places: Sequence[str]) -> Iterator[Sequence[str]]:
    """What each rule saw, and how often runs end well under those that act, by place."""
    yield ("harmful runs", *places)
    runs = board.alarms[SUREFOOT].detection
    yield ("how many", *(str(runs.get(place, DetectionScore()).runs) for place in places))
    for name, figures in board.alarms.items():
        yield (
            f"{name}: seen, after",
            *(_detection_cell(figures.detection.get(place, DetectionScore())) for place in places),
        )
    for judge, figures in board.interventions.items():
        yield (
            f"{judge}: end well, loss",
            *(_outcome_cell(figures.outcomes.get(place, OutcomeScore())) for place in places),
        )
    for name, figures in board.alarms.items():
        if figures.false_alarms_by_family.keys() & set(places):
            yield (
                f"{name}: false findings",
                *(_number(figures.false_alarms_by_family.get(p, FalseAlarmScore()).rate) for p in places),
            )
    for judge, figures in board.interventions.items():
        if figures.false_interventions_by_family.keys() & set(places):
            yield (
                f"{judge}: false interventions",
                *(_number(figures.false_interventions_by_family.get(p, FalseAlarmScore()).rate) for p in places),
            )


def _detection_cell(seen: DetectionScore) -> str:
    """Share seen, median steps after the onset, and the share named right where causes are named."""
    parts = [_percent(seen.share), _number(seen.delay)] if seen.detected else [_percent(seen.share)]
    return ", ".join([*parts, f"cause {seen.cause_right / seen.runs:.0%}"] if seen.cause_named else parts)


def _outcome_cell(cured: OutcomeScore) -> str:
    """Share that ended well, and the median loss as a ratio to the twin's."""
    return f"{_percent(cured.share)}, {_number(cured.median_ratio, 2)}" if cured.ratios else "-"


def _published_rows(board: Scoreboard) -> Iterator[Sequence[str]]:
    yield ("run", "said", *board.alarms)
    for trace in PUBLISHED_RUNS:
        said = "healthy" if trace.healthy else "trouble"
        yield (
            trace.name,
            said,
            *(_first_alarm_cell(trace, f.published_runs[trace.name]) for f in board.alarms.values()),
        )


def _first_alarm_cell(trace: PublishedRun, look: RuleReport) -> str:
    if trace.healthy:
        return "false" if look.alarms else "silent"
    early = any(at < PRELUDE_STEPS for at in look.alarms)
    first = next((at - PRELUDE_STEPS - trace.spike for at in look.alarms if at >= PRELUDE_STEPS), None)
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
    """The figures for a program to read; a share or number is null where nothing was measured."""

    def plain(value: float) -> float | None:
        return value if math.isfinite(value) else None

    look = {
        name: {
            "seen": {
                place: {"runs": s.runs, "share": plain(s.share), "delay": plain(s.delay), "cause_right": s.cause_right}
                for place, s in figures.detection.items()
            },
            "false_findings": plain(figures.false_alarms.rate),
        }
        for name, figures in board.alarms.items()
    }
    act = {
        judge: {
            "cured": {
                place: {
                    "runs": len(c.ratios),
                    "share": plain(c.share),
                    "loss_to_twin": plain(c.median_ratio),
                    "dead": c.dead,
                }
                for place, c in figures.outcomes.items()
            },
            "false_interventions": plain(figures.false_interventions.rate),
            "healthy_harmed": plain(1 - figures.healthy_outcomes.share),
        }
        for judge, figures in board.interventions.items()
    }
    return {"looking": look, "acting": act, "not_as_stated": board.not_as_stated}
