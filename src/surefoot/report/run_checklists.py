"""The checklists "during a run" and "after a crash", answered from the run itself: yes, no or unknown, and a figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np

from surefoot.journal.reader import Run
from surefoot.logs.log_diagnosis import LogDiagnosis
from surefoot.logs.report.wording import PATTERN_PHRASES
from surefoot.records import Action, Pattern, Verdict
from surefoot.sinks.progress import format_duration
from surefoot.story.run_story import RunStory, RunVerdict

HOUR = 3600.0
MOSTLY = 0.95
"""The share of the updates in which something has to be known to count as measured."""
SHOWN_CHANGES = 4


class CheckAnswer(StrEnum):
    """The answer to one item."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class CheckedItem:
    """One item of a checklist, answered."""

    item: str
    answer: CheckAnswer
    figure: str
    """What the answer rests on."""


@dataclass(frozen=True, slots=True)
class ChecklistFacts:
    """What the items look at."""

    run: Run
    story: RunStory
    diagnosis: LogDiagnosis

    def column(self, name: str) -> np.ndarray:
        known = self.run.scalars.rows and name in self.run.scalars
        return np.asarray(self.run.scalars[name], np.float64) if known else np.empty(0)

    def checkpoint_events(self, *names: str) -> list[dict[str, Any]]:
        return [e for e in self.run.events if e.get("kind") == "checkpoint" and e.get("name") in names]


Answered = tuple[CheckAnswer, str]


def _yes(condition: bool) -> CheckAnswer:
    return CheckAnswer.YES if condition else CheckAnswer.NO


def during(facts: ChecklistFacts) -> list[CheckedItem]:
    """What should be true while a run trains."""
    return _answer(_DURING, facts)


def after_crash(facts: ChecklistFacts) -> list[CheckedItem]:
    """What should follow a crash; nothing for a run that neither crashed nor was resumed."""
    crashed = facts.story.verdict in (RunVerdict.FAILED, RunVerdict.KILLED)
    if not crashed and not facts.checkpoint_events("resumed"):
        return []
    return _answer(_AFTER_CRASH, facts)


def _answer(
    items: Sequence[tuple[str, Callable[[ChecklistFacts], Answered]]], facts: ChecklistFacts
) -> list[CheckedItem]:
    return [CheckedItem(item, *check(facts)) for item, check in items]


# -- during


def _measured(column: str) -> Callable[[ChecklistFacts], Answered]:
    def check(facts: ChecklistFacts) -> Answered:
        values = facts.column(column)
        if not len(values):
            return CheckAnswer.UNKNOWN, "no update is recorded"
        refused = facts.column("verdict") == Verdict.NONFINITE
        known = int((~np.isnan(values) | refused).sum())
        return _yes(known >= MOSTLY * len(values)), f"in {known:,} of {len(values):,} updates"

    return check


def _layers(facts: ChecklistFacts) -> Answered:
    layers = facts.run.layers
    return _yes(bool(layers.rows)), f"{len(layers):,} tensors in {layers.rows:,} rows" if layers.rows else "none"


def _protected(facts: ChecklistFacts) -> Answered:
    config = facts.run.info.get("config")
    policy = config.get("policy") if isinstance(config, Mapping) else None
    if not isinstance(policy, Mapping) or "observe" not in policy:
        return CheckAnswer.UNKNOWN, "run.json does not say"
    if policy["observe"]:
        return CheckAnswer.NO, "the policy only observes"
    return CheckAnswer.YES, f"{facts.story.saved.refused:,} refused"


def _hourly(facts: ChecklistFacts) -> Answered:
    times = sorted(checkpoint.time for checkpoint in facts.story.checkpoints if checkpoint.time > 0)
    start, end = facts.story.started, facts.story.updated
    if not times:
        return CheckAnswer.NO, f"no checkpoint in {format_duration(max(0.0, end - start))}"
    if not start or not end:
        return CheckAnswer.UNKNOWN, f"{len(times)} checkpoints; the run's times are not recorded"
    edges = [min(start, times[0]), *times, max(end, times[-1])]
    longest = max(later - earlier for earlier, later in pairwise(edges))
    return _yes(longest <= HOUR), f"{len(times)} checkpoints, at most {format_duration(longest)} apart"


def _alarms(facts: ChecklistFacts) -> Answered:
    sent = [event for event in facts.run.events if event.get("kind") == "alarm" or event.get("name") == "alarm"]
    return (CheckAnswer.YES, f"{len(sent)} sent") if sent else (CheckAnswer.UNKNOWN, "none is recorded in the run")


def _ended_finite(facts: ChecklistFacts) -> Answered:
    story = facts.story
    if story.last_loss is None:
        return CheckAnswer.UNKNOWN, "no finite loss of an applied update is recorded"
    losses, verdicts = facts.column("loss"), facts.column("verdict")
    bad = bool(len(losses)) and verdicts[-1] == Verdict.APPLIED and bool(np.isinf(losses[-1]))
    return _yes(not bad), f"{story.last_loss:.4g}"


_DURING: tuple[tuple[str, Callable[[ChecklistFacts], Answered]], ...] = (
    ("the gradient norm is measured at every update", _measured("norm")),
    ("the loss is watched at every update", _measured("loss")),
    ("its difference from step to step is recorded", _measured("loss_d1")),
    ("gradients are measured layer by layer", _layers),
    ("bad updates are refused", _protected),
    ("a checkpoint is saved at least hourly", _hourly),
    ("the last applied loss is finite", _ended_finite),
    ("alarms reach a person", _alarms),
)


# -- after a crash


def _analysed(facts: ChecklistFacts) -> Answered:
    if facts.diagnosis.causes:
        first = facts.diagnosis.causes[0]
        return CheckAnswer.YES, f"{first.cause} ({first.confidence:.0%} sure)"
    return CheckAnswer.UNKNOWN, f"the numbers show no cause; the run {facts.story.ended.rstrip(',;')}"


def _shape(facts: ChecklistFacts) -> Answered:
    pattern = facts.diagnosis.pattern
    if pattern is Pattern.NONE:
        return CheckAnswer.UNKNOWN, "the loss shows no known pattern"
    return CheckAnswer.YES, PATTERN_PHRASES.get(pattern, str(pattern))


def _adjusted(facts: ChecklistFacts) -> Answered:
    relevant = (Action.REWIND, Action.CONSTRAIN)
    acted = sum(a.action in relevant and a.applied for i in facts.story.incidents for a in i.actions)
    earlier = facts.run.info.get("earlier")
    if not isinstance(earlier, list) or not earlier:
        return (CheckAnswer.YES, f"surefoot changed it {acted}x") if acted else (CheckAnswer.NO, "not resumed yet")
    changes = changed_settings(earlier[-1], facts.run.info)
    if changes:
        more = f" and {len(changes) - SHOWN_CHANGES} more" if len(changes) > SHOWN_CHANGES else ""
        return CheckAnswer.YES, f"{', '.join(changes[:SHOWN_CHANGES])}{more}"
    return (
        (CheckAnswer.YES, f"surefoot changed it {acted}x") if acted else (CheckAnswer.NO, "the settings are the same")
    )


def changed_settings(before: Any, now: Mapping[str, Any]) -> list[str]:
    """Names of the settings in `config` and `recipe` that differ between two attaches."""
    if not isinstance(before, Mapping):
        return []
    sections = ("config", "recipe")
    old, new = ({name: value for s in sections for name, value in _flat(info.get(s), s)} for info in (before, now))
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def _flat(value: Any, name: str) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [pair for key, part in value.items() for pair in _flat(part, f"{name}.{key}")]
    return [(name, value)]


def _resumed(facts: ChecklistFacts) -> Answered:
    resumed = facts.checkpoint_events("resumed")
    if not resumed:
        return CheckAnswer.NO, "not resumed yet"
    values = resumed[-1].get("values")
    step = values.get("step") if isinstance(values, Mapping) else None
    health = next((c.health for c in facts.story.checkpoints if c.step == step), "")
    answer = CheckAnswer.UNKNOWN if not health else _yes(health == "healthy")
    return answer, f"from step {step}, marked {health}" if health else f"from step {step}, which is not marked"


def _verified(facts: ChecklistFacts) -> Answered:
    proofs = facts.checkpoint_events("proved", "unproven")
    if not facts.checkpoint_events("resumed"):
        return CheckAnswer.NO, "not resumed yet"
    if not proofs:
        return CheckAnswer.UNKNOWN, "no saved batch to compute again; pass step_fn="
    return _yes(proofs[-1].get("name") == "proved"), str(proofs[-1].get("detail") or "")


def _recorded(facts: ChecklistFacts) -> Answered:
    bundles = sum(bool(incident.bundle) for incident in facts.story.incidents)
    return _yes(bool(facts.run.events)), f"{len(facts.run.events):,} events, {bundles} incident bundles"


_AFTER_CRASH: tuple[tuple[str, Callable[[ChecklistFacts], Answered]], ...] = (
    ("the logs are analysed and a cause is named", _analysed),
    ("the shape of the failure is named", _shape),
    ("the settings were adjusted", _adjusted),
    ("the run was resumed from a healthy checkpoint", _resumed),
    ("the resume was verified by a saved batch", _verified),
    ("what happened is recorded", _recorded),
)
