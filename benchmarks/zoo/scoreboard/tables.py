"""The scoreboard: results of all runs turned into figures for each rule, and those into tables."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import surefoot
from benchmarks.zoo import FAULTS
from benchmarks.zoo.attached import rows_of
from benchmarks.zoo.jobs import BARE, OURS, Job, Result
from benchmarks.zoo.published_runs import PRELUDE, TRACES, Trace, shown
from benchmarks.zoo.published_runs import rows as trace_rows
from benchmarks.zoo.scenario import STRENGTHS, Scenario
from benchmarks.zoo.scoreboard.scores import Cured, Look, Seen, Wolf, gated, looking, told
from benchmarks.zoo.verify import harmed
from surefoot.records import StepMetrics, Verdict

ALL = "all"
HARMLESS = "harmless"


@dataclass(slots=True)
class Looking:
    """The figures of a rule that looks."""

    seen: dict[str, Seen] = field(default_factory=dict)
    """By strength, by group of faults, by kind and by model family; harmful faults, the harmless ones apart."""
    wolf: Wolf = field(default_factory=Wolf)
    wolves: dict[str, Wolf] = field(default_factory=dict)
    """The same by model family."""
    traces: dict[str, Look] = field(default_factory=dict)


@dataclass(slots=True)
class Acting:
    """The figures of a rule that acts; of the bare loop too."""

    cured: dict[str, Cured] = field(default_factory=dict)
    wolf: Wolf = field(default_factory=Wolf)
    wolves: dict[str, Wolf] = field(default_factory=dict)
    healthy: Cured = field(default_factory=Cured)
    """Healthy runs under its hands, against the same runs bare."""


@dataclass(slots=True)
class Board:
    """All figures of one bench."""

    scenarios: Sequence[Scenario]
    results: Mapping[tuple[str, str], Result]
    folder: Path
    looking: dict[str, Looking] = field(default_factory=dict)
    acting: dict[str, Acting] = field(default_factory=dict)
    not_as_stated: list[str] = field(default_factory=list)
    overflows: dict[str, frozenset[int]] = field(default_factory=dict)
    """Steps of each healthy run that loss scaling left out by itself: who acts there changes nothing."""

    def ratio(self, scenario: Scenario, judge: str) -> float:
        """Final loss under a judge against the bare fault-free twin."""
        return self.results[scenario.id, judge].loss / self.results[scenario.twin.id, BARE].loss


def board_of(scenarios: Sequence[Scenario], results: Mapping[tuple[str, str], Result], folder: Path) -> Board:
    """Score every rule on every run."""
    board = Board(scenarios, results, folder)
    twins = list({s.twin.id: s.twin for s in scenarios}.values())
    everyone = [*twins, *scenarios]
    for name, look in looking().items():
        figures = board.looking[name] = Looking()
        for trace in TRACES:
            rows = published(trace)
            figures.traces[trace.name] = look(gated(rows) if name == OURS else rows)
    for scenario in everyone:
        rows = list(rows_of(Job(scenario.id, BARE, str(folder)).run_dir))
        if scenario.healthy:
            board.overflows[scenario.id] = frozenset(r.attempt for r in rows if r.verdict is Verdict.OVERFLOW)
        for name, look in looking().items():
            # surefoot is judged by what it said where it stood by, and where it only observed by what it said there
            stood_by = Job(scenario.id, OURS if (scenario.id, OURS) in results else BARE, str(folder))
            saw = told(stood_by.run_dir, scenario) if name == OURS else look(rows)
            _add_look(board.looking[name], scenario, saw)
    for judge in dict.fromkeys(judge for _, judge in results):
        board.acting[judge] = Acting()
        for scenario in everyone:
            if (scenario.id, judge) in results:
                _add_ending(board, judge, scenario)
    board.not_as_stated = list(_surprises(board))
    return board


def published(trace: Trace) -> list[StepMetrics]:
    """A public run as rules are shown it."""
    return [replace(row, norm=norm) for row, (_, norm, _) in zip(trace_rows(trace), shown(trace), strict=True)]


def _places(scenario: Scenario) -> tuple[str, ...]:
    """Under which headings a fault is counted."""
    if not scenario.harmful:
        return (HARMLESS,)
    group = FAULTS[scenario.name].group
    return (ALL, scenario.strength, group, scenario.settings.family, scenario.name)


def _add_look(figures: Looking, scenario: Scenario, look: Look) -> None:
    if scenario.healthy:
        for wolf in (figures.wolf, figures.wolves.setdefault(scenario.settings.family, Wolf())):
            wolf.add(scenario, look.alarms)
        return
    for place in _places(scenario):
        figures.seen.setdefault(place, Seen()).add(scenario, look)


def _add_ending(board: Board, judge: str, scenario: Scenario) -> None:
    figures, result = board.acting[judge], board.results[scenario.id, judge]
    if scenario.healthy:
        acted = [at for at in result.acted if at not in board.overflows[scenario.id]]
        for wolf in (figures.wolf, figures.wolves.setdefault(scenario.settings.family, Wolf())):
            wolf.add(scenario, acted)
        bare = board.results[scenario.id, BARE].loss
        figures.healthy.add(result.loss / bare, stopped=result.stopped is not None)
        return
    if not scenario.curable or (scenario.id, OURS) not in board.results:
        return  # the bare loop is compared on the runs that others were tried on
    alone = scenario.settings.ranks == 1  # where there are more, not everyone was tried
    for place in _places(scenario) if alone else (FAULTS[scenario.name].group, scenario.name):
        stopped = result.stopped is not None
        figures.cured.setdefault(place, Cured()).add(board.ratio(scenario, judge), stopped=stopped)


def _surprises(board: Board) -> Iterator[str]:
    """What a scenario states of itself and the bare run shows otherwise."""
    for scenario in board.scenarios:
        ratio = board.ratio(scenario, BARE)
        if scenario.healthy:
            if not math.isfinite(ratio):
                yield f"{scenario.id} is stated healthy and died"
            continue
        if harmed(ratio) != scenario.harmful:
            said = "harmful" if scenario.harmful else "harmless"
            yield f"{scenario.id} is stated {said} and ended at {ratio:.3f} of its twin"
        if not _absent_before_onset(board, scenario):
            yield f"{scenario.id} differs from its twin before its onset"


def _absent_before_onset(board: Board, scenario: Scenario) -> bool:
    """Whether losses and norms up to the onset are those of the twin, bit for bit."""
    mine, twins = (_early(board, one, scenario.onset) for one in (scenario, scenario.twin))
    return mine == twins


def _early(board: Board, scenario: Scenario, onset: int) -> list[bytes]:
    scalars = surefoot.read(Job(scenario.id, BARE, str(board.folder)).run_dir).scalars
    before = scalars["attempt"] < onset
    return [scalars[name][before].tobytes() for name in ("loss", "norm", "lr", "loss_scale")]


# -- the tables


_TRACES = "The first alarm, in published steps before (-) or after (+) the one that is beyond dispute."


def tables(board: Board) -> str:
    """Everything, as Markdown."""
    parts = [
        _facts(board),
        "## Rules that look\n\n" + _table(_looking_lines(board)),
        "## Rules that act\n\n" + _table(_acting_lines(board)),
        *(f"## {head}\n\n{_table(_lines_by(board, places))}" for head, places in _headings(board)),
        f"## Public runs\n\n{_TRACES}\n\n{_table(_trace_lines(board))}",
    ]
    if board.not_as_stated:
        parts.append("## Not as stated\n\n" + "\n".join(f"- {line}" for line in board.not_as_stated))
    return "\n\n".join(parts)


def _facts(board: Board) -> str:
    faults = [s for s in board.scenarios if not s.healthy]
    kinds = len({s.name for s in faults})
    harmful = sum(s.harmful for s in faults)
    controls = [s for s in board.scenarios if s.healthy]
    steps = board.looking[OURS].wolf.steps
    return (
        f"{len(faults)} runs with a planted fault ({kinds} kinds, {harmful} harmful), {len(controls)} healthy controls "
        f"({len({s.name for s in controls})} kinds), {steps:,} healthy steps."
    )


def _looking_lines(board: Board) -> Iterator[Sequence[str]]:
    yield ("rule", "seen", *STRENGTHS, "steps after onset", "cause right", "harmless seen", "false findings")
    for name, figures in board.looking.items():
        whole = figures.seen.get(ALL, Seen())
        cause = f"{whole.right / whole.runs:.0%}" if whole.named else "-"
        yield (
            name,
            _percent(whole.share),
            *(_percent(figures.seen.get(strength, Seen()).share) for strength in STRENGTHS),
            _number(whole.delay),
            cause,
            _percent(figures.seen.get(HARMLESS, Seen()).share),
            _number(figures.wolf.rate),
        )


def _acting_lines(board: Board) -> Iterator[Sequence[str]]:
    yield ("loop", "cured", *STRENGTHS, "loss to twin's", "dead", "given up", "false interventions", "healthy harmed")
    for judge, figures in board.acting.items():
        whole = figures.cured.get(ALL, Cured())
        yield (
            judge,
            _percent(whole.share),
            *(_percent(figures.cured.get(strength, Cured()).share) for strength in STRENGTHS),
            _number(whole.middle, 3),
            _percent(whole.dead),
            str(whole.stopped),
            _number(figures.wolf.rate),
            _percent(1 - figures.healthy.share),
        )


def _headings(board: Board) -> Iterator[tuple[str, Sequence[str]]]:
    yield "By what is wrong", list(dict.fromkeys(k.group for k in FAULTS.values()))
    yield "By model", list(dict.fromkeys(s.settings.family for s in board.scenarios))


def _lines_by(board: Board, places: Sequence[str]) -> Iterator[Sequence[str]]:
    """What each rule saw, and how often runs end well under those that act, by place."""
    yield ("harmful runs", *places)
    runs = board.looking[OURS].seen
    yield ("how many", *(str(runs.get(place, Seen()).runs) for place in places))
    for name, figures in board.looking.items():
        yield (f"{name}: seen, after", *(_sight(figures.seen.get(place, Seen())) for place in places))
    for judge, figures in board.acting.items():
        yield (f"{judge}: end well, loss", *(_ending(figures.cured.get(place, Cured())) for place in places))
    for name, figures in board.looking.items():
        if figures.wolves.keys() & set(places):
            yield (f"{name}: false findings", *(_number(figures.wolves.get(p, Wolf()).rate) for p in places))
    for judge, figures in board.acting.items():
        if figures.wolves.keys() & set(places):
            yield (f"{judge}: false interventions", *(_number(figures.wolves.get(p, Wolf()).rate) for p in places))


def _sight(seen: Seen) -> str:
    """Share seen, median steps after the onset, and the share named right where causes are named."""
    parts = [_percent(seen.share), _number(seen.delay)] if seen.seen else [_percent(seen.share)]
    return ", ".join([*parts, f"cause {seen.right / seen.runs:.0%}"] if seen.named else parts)


def _ending(cured: Cured) -> str:
    """Share that ended well, and the median loss as a ratio to the twin's."""
    return f"{_percent(cured.share)}, {_number(cured.middle, 2)}" if cured.ratios else "-"


def _trace_lines(board: Board) -> Iterator[Sequence[str]]:
    yield ("run", "said", *board.looking)
    for trace in TRACES:
        said = "healthy" if trace.healthy else "trouble"
        yield (trace.name, said, *(_first(trace, f.traces[trace.name]) for f in board.looking.values()))


def _first(trace: Trace, look: Look) -> str:
    if trace.healthy:
        return "false" if look.alarms else "silent"
    early = any(at < PRELUDE for at in look.alarms)
    first = next((at - PRELUDE - trace.spike for at in look.alarms if at >= PRELUDE), None)
    return ("missed" if first is None else f"{first:+d}") + (" (and false before)" if early else "")


def _table(lines: Iterator[Sequence[str]]) -> str:
    head, *body = lines
    rule = ["---"] * len(head)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *body))


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.0%}"


def _number(value: float, digits: int = 0) -> str:
    return "-" if math.isnan(value) else f"{value:,.{digits}f}"


def as_data(board: Board) -> dict[str, Any]:
    """The figures for a program to read; a share or number is null where nothing was measured."""

    def plain(value: float) -> float | None:
        return value if math.isfinite(value) else None

    look = {
        name: {
            "seen": {
                place: {"runs": s.runs, "share": plain(s.share), "delay": plain(s.delay), "cause_right": s.right}
                for place, s in figures.seen.items()
            },
            "false_findings": plain(figures.wolf.rate),
        }
        for name, figures in board.looking.items()
    }
    act = {
        judge: {
            "cured": {
                place: {"runs": len(c.ratios), "share": plain(c.share), "loss_to_twin": plain(c.middle), "dead": c.dead}
                for place, c in figures.cured.items()
            },
            "false_interventions": plain(figures.wolf.rate),
            "healthy_harmed": plain(1 - figures.healthy.share),
        }
        for judge, figures in board.acting.items()
    }
    return {"looking": look, "acting": act, "not_as_stated": board.not_as_stated}
