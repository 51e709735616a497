"""`surefoot bench logs`: accuracy of `surefoot diagnose` on hand-labelled logs.

The folder holds the logs and an `INDEX.csv` with the columns file, label and source (a repository, then a path).
"""

from __future__ import annotations

import csv
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from surefoot.logs.diagnose_log import diagnose_tables
from surefoot.logs.formats import detect
from surefoot.logs.log_diagnosis import LogDiagnosis, RunHealth, UnreadableInput
from surefoot.logs.symptoms.symptom import DEFAULT_THRESHOLDS, SymptomThresholds
from surefoot.logs.table import LogTable
from surefoot.records import Pattern

INDEX = "INDEX.csv"

LABELS: dict[str, tuple[RunHealth, Pattern]] = {
    "healthy": (RunHealth.HEALTHY, Pattern.NONE),
    "nan": (RunHealth.FAILED, Pattern.NONFINITE),
    "zero_loss_nan_grad": (RunHealth.FAILED, Pattern.COLLAPSE_TO_ZERO),
    "jump": (RunHealth.FAILED, Pattern.JUMP),
    "exponential": (RunHealth.FAILED, Pattern.EXPONENTIAL),
    "oscillating_divergence": (RunHealth.FAILED, Pattern.OSCILLATING),
    "plateau": (RunHealth.WARNING, Pattern.PLATEAU),
    "overfit": (RunHealth.WARNING, Pattern.OVERFIT),
    "spike_recovered": (RunHealth.WARNING, Pattern.RECOVERED_SPIKE),
    "overflow_skips": (RunHealth.WARNING, Pattern.OVERFLOW_SKIPS),
}
"""The meaning of each label; `other` stands for anything but healthy and has no pattern."""

GRID: dict[str, tuple[float, ...]] = {
    "blowup_rise": (0.5, 0.7, 1.0),
    "rise_to_noise": (1.5, 2.5, 4.0),
    "slow_rise": (0.05, 0.1, 0.2),
    "spike_to_noise": (6.0, 10.0, 15.0),
    "overfit_rise": (0.08, 0.15, 0.3),
    "min_fall": (0.03, 0.05, 0.08),
}
"""Threshold values that the cross-validation chooses from."""


@dataclass(frozen=True, slots=True)
class LabelledLog:
    """A labelled log and its tables."""

    file: str
    label: str
    repository: str
    tables: tuple[LogTable, ...]

    def judged(self, thresholds: SymptomThresholds = DEFAULT_THRESHOLDS) -> LogDiagnosis:
        return diagnose_tables(self.tables, thresholds=thresholds)


@dataclass(frozen=True, slots=True)
class LogScore:
    """The diagnosis of one log against its label."""

    log: LabelledLog
    answer: LogDiagnosis

    @property
    def verdict_right(self) -> bool:
        if self.log.label == "other":
            return self.answer.verdict is not RunHealth.HEALTHY
        return self.answer.verdict is LABELS[self.log.label][0]

    @property
    def pattern_right(self) -> bool | None:
        if self.log.label == "other":
            return None
        return self.answer.pattern is LABELS[self.log.label][1]

    @property
    def false_failure(self) -> bool:
        """A healthy run called failed."""
        return self.log.label == "healthy" and self.answer.verdict is RunHealth.FAILED


def main(folder: Path, *, cross_validate: bool, say: Callable[[str], None]) -> str:
    """The accuracy on a folder of labelled logs, as text."""
    logs, unread = _read(folder)
    scores = [LogScore(log, log.judged()) for log in logs]
    lines = [
        _accuracy_line("default thresholds", scores, len(unread)),
        *(f"  cannot be read: {error}" for error in unread),
    ]
    lines += [_mistake_line(score) for score in scores if not score.verdict_right or score.pattern_right is False]
    if cross_validate:
        lines += _cross_validate(logs, say)
    return "\n".join(lines)


def _read(folder: Path) -> tuple[list[LabelledLog], list[str]]:
    index = folder / INDEX
    if not index.is_file():
        raise ValueError(f"{folder} has no {INDEX}: a CSV file with the columns file, label and source")
    logs: list[LabelledLog] = []
    unread: list[str] = []
    with index.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row.get("label") not in (*LABELS, "other"):
                raise ValueError(f"{index}: {row.get('label')!r} is no label. Use {', '.join(LABELS)} or other")
            try:
                tables = tuple(detect.read_log(folder / row["file"]))
            except UnreadableInput as error:
                unread.append(str(error))
                continue
            logs.append(LabelledLog(row["file"], row["label"], (row.get("source") or row["file"]).split()[0], tables))
    return logs, unread


def _accuracy_line(name: str, scores: Sequence[LogScore], unread: int = 0) -> str:
    count = len(scores) + unread
    right = sum(score.verdict_right for score in scores)
    patterns = [score.pattern_right for score in scores if score.pattern_right is not None]
    false_failures = sum(score.false_failure for score in scores)
    return (
        f"{name}: {len(scores)} of {count} logs read; verdict right in {right} ({right / max(count, 1):.0%}),"
        f" pattern in {sum(patterns)} of {len(patterns)} ({sum(patterns) / max(len(patterns), 1):.0%});"
        f" healthy runs called failed: {false_failures}"
    )


def _mistake_line(score: LogScore) -> str:
    answer = score.answer
    return f"  {score.log.file}: {score.log.label}, diagnosed {answer.verdict} / {answer.pattern}: {answer.sentence}"


def _cross_validate(logs: Sequence[LabelledLog], say: Callable[[str], None]) -> list[str]:
    """Judge every repository with thresholds chosen on the others."""
    tried = list(_threshold_choices())
    scores: list[list[LogScore]] = []
    for number, sight in enumerate(tried, 1):
        scores.append([LogScore(log, log.judged(sight)) for log in logs])
        if number % 10 == 0:
            say(f"{number} of {len(tried)} threshold choices tried")
    held_out: list[LogScore] = []
    chosen: Counter[int] = Counter()
    for repository in sorted({log.repository for log in logs}):
        best = max(
            range(len(tried)), key=lambda at: _objective(s for s in scores[at] if s.log.repository != repository)
        )
        chosen[best] += 1
        held_out += [score for score in scores[best] if score.log.repository == repository]
    (usual, times), *_ = chosen.most_common(1)
    return [
        _accuracy_line(f"cross-validated over {chosen.total()} repositories", held_out),
        f"  {len(tried)} threshold choices; chosen most often ({times} times): {tried[usual]}",
    ]


def _threshold_choices() -> Iterator[SymptomThresholds]:
    """The default thresholds, each one changed by itself, and every two changed together."""
    yield DEFAULT_THRESHOLDS
    moves = [
        (name, value) for name, values in GRID.items() for value in values if value != getattr(DEFAULT_THRESHOLDS, name)
    ]
    for name, value in moves:
        yield replace(DEFAULT_THRESHOLDS, **{name: value})
    for (first_name, first), (second_name, second) in itertools.combinations(moves, 2):
        if first_name != second_name:
            yield replace(DEFAULT_THRESHOLDS, **{first_name: first, second_name: second})


def _objective(scores: Iterable[LogScore]) -> float:
    """Number of right verdicts and patterns; a healthy run called failed costs ten of them."""
    return sum(score.verdict_right + bool(score.pattern_right) - 10 * score.false_failure for score in scores)
