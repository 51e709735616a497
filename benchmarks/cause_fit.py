"""`surefoot bench causes`: fits how much each clue counts for its cause to recorded runs, and compares the fit with the
table in use.

Fitted on one set of model families and judged on another: the tuning and the reporting part of the fault zoo. Runs are
recorded while surefoot only observes; a case is what the judge knew when it first named a cause after the onset.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.recorded_run import read_attaches
from benchmarks.worker_pool import run_unordered
from benchmarks.zoo.families import Split
from benchmarks.zoo.jobs import BARE, ZooJob, scenarios_of
from benchmarks.zoo.scenario import Scenario
from benchmarks.zoo.scoreboard.scores import SYSTEM_CAUSES
from surefoot.judge import judge as judge_module
from surefoot.judge.case_facts import CaseFacts
from surefoot.judge.incident import Incident
from surefoot.judge.judge import Judge
from surefoot.judge.rank_causes import CLUES, CLUES_BY_FINDING, TYPED_CLUES, clue_names
from surefoot.records import Cause, Diagnosis, StepMetrics

SHARPNESS = 4.0
"""How far apart two log odds must be for one cause to lead clearly: a quarter."""
PENALTIES = (0.01, 0.03, 0.1, 0.3)
"""Weights of the squared distance from the typed confidences; cross-validation chooses."""
TYPED = tuple(clue.confidence for clue in TYPED_CLUES)
FOLDS = 5
STEPS, STEP_SIZE = 400, 0.5
"""Of the descent."""
MAX_LOG_ODDS = 4.0
"""No clue alone is surer than 98 %."""
HEADER = '''"""How sure each clue makes its cause: written by `surefoot bench causes --out`, fitted to recorded runs."""

from __future__ import annotations

from collections.abc import Mapping

CONFIDENCES: Mapping[str, float] = {'''
FOOTER = '''}
"""By cause and place in the table of `rank_causes`."""
'''


@dataclass(frozen=True, slots=True)
class Case:
    """One incident: the clues that held, as positions in the table and in the order of evaluation."""

    scenario: str
    fault: str
    right: frozenset[Cause]
    clues: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """The cases of one part of the zoo."""

    cases: Sequence[Case]
    runs: int
    """Recorded runs; in some of them no cause was named."""

    def right(self, confidences: Sequence[float]) -> int:
        return sum(leading_cause(case, confidences) in case.right for case in self.cases)


@dataclass(frozen=True, slots=True)
class Comparison:
    """The table in use beside the fitted one, on both parts."""

    parts: dict[Split, Part]
    fitted: Sequence[float]
    penalty: float

    def as_data(self) -> dict[str, Any]:
        tables = {"typed": TYPED, "in_use": confidences_in_use(), "fitted": self.fitted}
        right = {
            split.value: {"runs": part.runs, "cases": len(part.cases)}
            | {name: part.right(held) for name, held in tables.items()}
            for split, part in self.parts.items()
        }
        return {"right": right, "penalty": self.penalty, "confidences": named(self.fitted)}

    @property
    def better(self) -> bool:
        """Whether the fit names more causes than the typed table on the part that it was not fitted to."""
        held_out = self.parts[Split.REPORT]
        return held_out.right(self.fitted) > held_out.right(TYPED)

    def as_text(self) -> str:
        lines = [
            "| part | runs | a cause named | right: typed | right: in use | right: fit |",
            "|---|---|---|---|---|---|",
        ]
        for split, part in self.parts.items():
            typed, now, fitted = (part.right(held) for held in (TYPED, confidences_in_use(), self.fitted))
            label = "fitted to" if split is Split.TUNING else "held out"
            lines.append(f"| {split.value} ({label}) | {part.runs} | {len(part.cases)} | {typed} | {now} | {fitted} |")
        for name, before, after in self._changed():
            lines.append(f"{name}: {before:.2f} -> {after:.2f}")
        verdict = "The fit is better." if self.better else "The fit is no better: keep what is typed."
        return "\n".join([*lines, verdict])

    def _changed(self) -> Iterator[tuple[str, float, float]]:
        pairs = zip(named(confidences_in_use()).items(), self.fitted, strict=True)
        yield from ((name, now, fit) for (name, now), fit in pairs if abs(fit - now) >= 0.05)


def confidences_in_use() -> list[float]:
    return [clue.confidence for clue in CLUES]


def named(confidences: Sequence[float]) -> dict[str, float]:
    """The confidences by the names of the clues."""
    return dict(zip(clue_names(TYPED_CLUES), confidences, strict=True))


def table(confidences: Sequence[float]) -> str:
    """The source of `judge/cause_confidences.py`."""
    lines = [f'    "{name}": {confidence},' for name, confidence in named(confidences).items()]
    return "\n".join([HEADER, *lines, FOOTER])


# -- cases


def record(folder: Path, every: int, workers: int, progress: Callable[[str], None]) -> dict[Split, list[Scenario]]:
    """Record every n-th fault of both parts, as far as it has not been recorded yet."""
    chosen = {
        split: [s for s in scenarios_of(split) if not s.healthy and s.settings.ranks == 1][::every] for split in Split
    }
    jobs = [ZooJob(s.id, BARE, str(folder)) for scenarios in chosen.values() for s in scenarios]
    todo = [job for job in jobs if not job.run_dir.is_dir()]
    for done, result in enumerate(run_unordered(ZooJob.run, todo, workers), 1):
        progress(f"{done}/{len(todo)} {result.id}")
    return chosen


def case_of(run_dir: Path, scenario: Scenario) -> Case | None:
    """What held when a cause was first named from the onset on; None if none was."""
    right = scenario.also_causes | ({scenario.cause} if scenario.cause is not None else set())
    for attempt, causes, clues in _diagnosed(run_dir):
        planted_outside = scenario.cause in SYSTEM_CAUSES
        if attempt >= scenario.onset and (planted_outside or any(cause not in SYSTEM_CAUSES for cause in causes)):
            return Case(scenario.id, scenario.name, right, clues)
    return None


def _diagnosed(run_dir: Path) -> Iterator[tuple[int, list[Cause], tuple[int, ...]]]:
    """For each incident that the judge diagnoses in a recorded run: when, as what, and the clues that held."""
    diagnose, seen = judge_module.diagnose_incident, list[tuple[int, list[Cause], tuple[int, ...]]]()

    def observe(row: StepMetrics, incident: Incident, *, has_good_state: bool) -> list[Diagnosis]:
        diagnoses = diagnose(row, incident, has_good_state=has_good_state)
        seen.append((row.attempt, [diagnosis.cause for diagnosis in diagnoses], tuple(holding_clues(incident))))
        return diagnoses

    for attach in read_attaches(run_dir)[0]:
        judge = attach.judge(attach.policy)
        assert isinstance(judge, Judge)
        for recorded in attach.rows():
            for notice in recorded.notices:
                if notice.origin is not None:
                    where = {name: notice.origin[name] for name in ("module", "kind", "inputs", "weights")}
                    judge.located(StepMetrics(step=notice.step, attempt=notice.attempt, time=0.0), **where)
            if recorded.judged:
                with patch.object(judge_module, "diagnose_incident", observe):
                    judge.update(recorded.row, recorded.layers)
                yield from seen
                seen.clear()


def holding_clues(incident: Incident) -> Iterator[int]:
    """Every clue that holds, by its place in the table and in the order of evaluation."""
    case, start = CaseFacts(incident), 0
    for kinds, clues in CLUES_BY_FINDING:
        for finding in incident.found(*kinds) if kinds else (case.NO_FINDING,):
            case.finding = finding
            yield from (start + place for place, clue in enumerate(clues) if clue.when(case))
        start += len(clues)


# -- the fit


def leading_cause(case: Case, confidences: Sequence[float]) -> Cause:
    """The cause that `rank_causes` would name first."""
    best: dict[Cause, float] = {}
    for clue in case.clues:
        cause = CLUES[clue].cause
        if best.get(cause, -1.0) < confidences[clue]:
            best[cause] = confidences[clue]
    return max(best, key=lambda cause: best[cause], default=Cause.UNKNOWN)


def fit(cases: Sequence[Case], penalty: float) -> list[float]:
    """Confidences under which the right cause leads most clearly, close to the typed ones: a penalised multinomial
    regression on the surest clue of each cause."""
    start = [_log_odds(clue.confidence) for clue in TYPED_CLUES]
    odds = list(start)
    for _ in range(STEPS):
        slope = [penalty * (now - before) for now, before in zip(odds, start, strict=True)]
        for case in cases:
            for clue, excess in _slopes(case, odds):
                slope[clue] += excess / len(cases)
        odds = [max(-MAX_LOG_ODDS, min(MAX_LOG_ODDS, now - STEP_SIZE * s)) for now, s in zip(odds, slope, strict=True)]
    return [round(1 / (1 + math.exp(-value)), 3) for value in odds]


def _slopes(case: Case, odds: Sequence[float]) -> Iterator[tuple[int, float]]:
    """How the loss of one case changes with the log odds of the surest clue of each cause."""
    surest: dict[Cause, int] = {}
    for clue in case.clues:
        cause = CLUES[clue].cause
        if cause not in surest or odds[surest[cause]] < odds[clue]:
            surest[cause] = clue
    if not case.right & surest.keys() or len(surest) < 2:
        return
    top = max(odds[clue] for clue in surest.values())
    weights = {cause: math.exp(SHARPNESS * (odds[clue] - top)) for cause, clue in surest.items()}
    total, total_right = sum(weights.values()), sum(weights[cause] for cause in case.right & surest.keys())
    for cause, clue in surest.items():
        target = weights[cause] / total_right if cause in case.right else 0.0
        yield clue, weights[cause] / total - target


def _log_odds(confidence: float) -> float:
    return max(-MAX_LOG_ODDS, min(MAX_LOG_ODDS, math.log(confidence / (1 - confidence))))


def cross_validated(cases: Sequence[Case]) -> float:
    """The penalty under which faults that were left out are named best; of equally good ones the strongest."""
    faults = sorted({case.fault for case in cases})
    folds = {fault: number % FOLDS for number, fault in enumerate(faults)}

    def right(penalty: float) -> int:
        count = 0
        for fold in range(FOLDS):
            confidences = fit([case for case in cases if folds[case.fault] != fold], penalty)
            left_out = [case for case in cases if folds[case.fault] == fold]
            count += sum(leading_cause(case, confidences) in case.right for case in left_out)
        return count

    return max(reversed(PENALTIES), key=right)


def compare(chosen: dict[Split, list[Scenario]], folder: Path) -> Comparison:
    """Fit to the tuning part, and count the right causes on both."""
    parts: dict[Split, Part] = {}
    for split, scenarios in chosen.items():
        cases = (case_of(ZooJob(s.id, BARE, str(folder)).run_dir, s) for s in scenarios)
        parts[split] = Part([case for case in cases if case is not None], len(scenarios))
    cases = parts[Split.TUNING].cases
    penalty = cross_validated(cases)
    return Comparison(parts, fit(cases, penalty), penalty)


def main(
    folder: Path, *, every: int, workers: int, out: Path | None, as_json: bool, progress: Callable[[str], None]
) -> str:
    """Record, fit and compare; `out` receives the fitted table."""
    comparison = compare(record(folder, every, workers, progress), folder)
    data = comparison.as_data()
    if out is not None:
        out.write_text(table(comparison.fitted), encoding="utf-8")
    return json.dumps(data, indent=1, sort_keys=True) if as_json else comparison.as_text()
