"""Gathers what a report shows: the story of a run, its diagnosis, settings, checklists; before any format."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.journal import reader
from surefoot.journal.reader import Run
from surefoot.logs.diagnose_log import diagnose
from surefoot.logs.formats.surefoot_run import is_run_dir
from surefoot.logs.log_diagnosis import LogDiagnosis, UnreadableInput
from surefoot.report.gradient_flow import GradientFlow, gradient_flow
from surefoot.report.run_checklists import CheckedItem, ChecklistFacts, after_crash, during
from surefoot.story.run_story import RunStory, RunVerdict

MAX_TEXT = 400
"""Characters of one setting."""
_HIDDEN = ("config.judged", "earlier", "recipe.text")
"""Entries of run.json that are long and of no use to a reader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """Everything a report shows."""

    run: Run
    story: RunStory
    diagnosis: LogDiagnosis
    flow: GradientFlow | None
    during: list[CheckedItem]
    after_crash: list[CheckedItem]
    """Empty if the run neither crashed nor was resumed."""

    @property
    def verdict(self) -> str:
        """The run in one word: that it goes on or was killed comes before its health."""
        story = self.story
        if story.verdict in (RunVerdict.RUNNING, RunVerdict.KILLED):
            return story.verdict.value
        return self.diagnosis.verdict.value if self.diagnosis.is_trouble else story.verdict.value

    @property
    def sentence(self) -> str:
        """The headline: the same as that of `surefoot diagnose`."""
        sentence = self.diagnosis.sentence.removeprefix("Healthy: ")
        if self.story.verdict is not RunVerdict.KILLED:
            return sentence[:1].upper() + sentence[1:]
        at = "" if self.story.last_step is None else f" after step {self.story.last_step:,}"
        return f"The process ended{at} without closing the run. Before that: {sentence}"

    @property
    def facts(self) -> list[tuple[str, str]]:
        """How it ended, in figures."""
        story = self.story
        known: list[tuple[str, str]] = [("run", story.ended.rstrip(",;"))]
        if story.last_step is not None:
            known.append(("updates", f"{story.last_step:,} applied in {story.attempts:,} attempts"))
        if story.first_loss is not None and story.last_loss is not None:
            known.append(("loss", f"{story.first_loss:.4g} to {story.last_loss:.4g}"))
        if story.best_eval_loss is not None and story.last_eval_loss is not None:
            known.append(("eval loss", f"{story.last_eval_loss:.4g}, at best {story.best_eval_loss:.4g}"))
        if story.ranks > 1:
            known.append(("ranks", str(story.ranks)))
        known.append(("protection", story.saved.sentence() or "no update was refused and nothing was rewound"))
        return known

    def settings(self) -> list[tuple[str, str]]:
        """The entries of run.json, by their path in it."""
        return [(name, text[:MAX_TEXT]) for name, text in _flat_settings(self.run.info, "") if text]


def _flat_settings(value: Any, name: str) -> list[tuple[str, str]]:
    if name in _HIDDEN:
        return []
    if isinstance(value, Mapping):
        start = f"{name}." if name else ""
        return [pair for key, part in value.items() for pair in _flat_settings(part, f"{start}{key}")]
    if isinstance(value, list) and any(isinstance(part, Mapping) for part in value):
        return [pair for k, part in enumerate(value) for pair in _flat_settings(part, f"{name}[{k}]")]
    if isinstance(value, list):
        return [(name, ", ".join(map(str, value)))]
    return [] if value is None else [(name, str(value))]


def make_report(run_dir: str | os.PathLike[str]) -> RunReport:
    """Read a run directory; raises UnreadableInput, a ValueError, for what is none."""
    try:
        run = reader.read(run_dir)
    except (OSError, ValueError) as error:
        raise UnreadableInput(str(error)) from None
    if not run.scalars.rows and not run.events:
        raise UnreadableInput(f"{run_dir} is a run directory in which nothing was recorded yet{_damage(run)}")
    if not is_run_dir(run_dir):
        raise UnreadableInput(f"{run_dir} is damaged: it has neither signals nor a readable run.json{_damage(run)}")
    diagnosis = diagnose(run_dir)
    story = diagnosis.story or run.story
    facts = ChecklistFacts(run, story, diagnosis)
    main = story.main
    return RunReport(
        run=run,
        story=story,
        diagnosis=diagnosis,
        flow=gradient_flow(run, None if main is None else main.attempt),
        during=during(facts),
        after_crash=after_crash(facts),
    )


def _damage(run: Run) -> str:
    return f" ({'; '.join(run.notes)})" if run.notes else ""
