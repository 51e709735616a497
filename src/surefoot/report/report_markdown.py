"""The report as Markdown, for a pull request or an issue."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence

from surefoot import __version__
from surefoot.logs.report.wording import clean, ordered_advice
from surefoot.report.report_page import loss_text, when_text
from surefoot.report.run_checklists import CheckedItem
from surefoot.report.run_report import RunReport
from surefoot.story.incident_block import action_lines, incident_title
from surefoot.story.incident_story import IncidentLevel, IncidentStory, TrialTable

MARKER = "<!-- surefoot report -->"
"""The first line of every report in Markdown, by which a later one knows that it may replace it."""
MAX_EVIDENCE = 5
_SETTINGS = re.compile(
    r"config\.(model|parameters|clip|effective_batch|processes|optimizers\[\d+\]\.(class|groups\[0\]\.lr))"
    r"|seeds\..*|code\..*|environment\.(python|torch|device|cuda|platform)|recipe\.(source|overrides)|surefoot"
)
"""The settings that a reviewer asks for first."""
_SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|<>~&$])")


def escaped(text: object) -> str:
    """Text from a run, as plain text in Markdown: no markup, no mention of people, no link."""
    plain = _SPECIAL.sub(
        lambda found: f"\\{found[1]}" if found[1] not in "<>&" else _ENTITIES[found[1]], clean(text, 2000)
    )
    return plain.replace("@", "@\u200b").replace("://", ":\u200b//").replace("www.", "www\u200b.")


_ENTITIES = {"<": "&lt;", ">": "&gt;", "&": "&amp;"}


def as_markdown(report: RunReport) -> str:
    """The complete document."""
    return "\n".join([MARKER, *_lines(report), "", f"surefoot {__version__}", ""])


def _lines(report: RunReport) -> Iterator[str]:
    yield f"## {report.verdict.upper()}: {escaped(report.sentence)}"
    yield ""
    yield from _table(("run", escaped(report.story.path)), report.facts)
    steps = ordered_advice(report.diagnosis.causes[:3], 5) if report.diagnosis.is_trouble else []
    if steps:
        yield from ("", "### What to do, in this order", "")
        yield from (f"{number}. {escaped(step)}" for number, step in enumerate(steps, 1))
    incidents = report.story.incidents
    if incidents:
        yield from ("", "### Incidents")
        for number, incident in enumerate(incidents, 1):
            yield from _incident(number, incident)
    if report.story.checkpoints:
        kept = [f"{c.step:,}" for c in report.story.checkpoints if c.on_disk]
        saved = len(report.story.checkpoints)
        yield from ("", f"Checkpoints on disk: {', '.join(kept) or 'none'} ({saved} saved in all).")
    yield from _checklist("during the run", report.during)
    if report.after_crash:
        yield from _checklist("after a crash", report.after_crash)
    settings = [(name, text) for name, text in report.settings() if _SETTINGS.fullmatch(name)]
    if settings:
        yield from ("", "<details><summary>Settings and environment</summary>", "")
        yield from _table(("setting", "value"), settings)
        yield from ("", "</details>")
    if report.story.notes:
        yield from ("", *(f"- {escaped(note)}" for note in report.story.notes))


def _incident(number: int, incident: IncidentStory) -> Iterator[str]:
    yield from ("", f"#### {number}. {escaped(incident_title(incident))}", "")
    yield f"- when: {escaped(when_text(incident))}"
    cause = incident.first_cause
    for line in cause.evidence[:MAX_EVIDENCE] if cause else ():
        yield f"- why: {escaped(line)}"
    for name, text in incident.place.parts():
        yield f"- {name}: {escaped(text)}"
    for line in action_lines(incident):
        yield f"- done: {escaped(line)}"
    if incident.outcome:
        yield f"- result: {escaped(incident.outcome)}"
    if cause is not None and cause.advice and incident.level is not IncidentLevel.REPORTED:
        yield f"- to do: {escaped(cause.advice[0])}"
    if incident.bundle:
        yield f"- bundle: {escaped(incident.bundle)} in the run directory"
    for trial in incident.trials:
        yield from _trial(trial)


def _trial(trial: TrialTable) -> Iterator[str]:
    if not trial.branches:
        return
    before = f", {trial.reference:.4g} at the snapshot" if math.isfinite(trial.reference) else ""
    yield from ("", f"Trial: the loss on {trial.probes} probe batches after each branch{before}.", "")
    rows = (
        (f"{row.text}{' (chosen)' if row.chosen else ''}", f"{row.steps:,}", loss_text(row.probe_loss))
        for row in trial.branches
    )
    yield from _table(("branch", "updates", "probe loss"), rows)


def _checklist(title: str, items: Sequence[CheckedItem]) -> Iterator[str]:
    yield from ("", f"### Checklist: {title}", "")
    yield from _table(("item", "answer", "figure"), ((c.item, c.answer.value, c.figure) for c in items))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(escaped(cell) for cell in row)} |"
