"""The report as one self-contained HTML page: no script, no network, light and dark, and it prints."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sequence

from surefoot.logs.report.html_page import escape_text, html_document, html_table, list_items
from surefoot.logs.report.svg_plot import draw_svg
from surefoot.logs.report.wording import ordered_advice
from surefoot.report.gradient_flow import MAX_LISTED, GradientFlow, flow_rows, flow_svg
from surefoot.report.run_charts import chart_marks, chart_panels
from surefoot.report.run_checklists import CheckAnswer, CheckedItem
from surefoot.report.run_report import RunReport
from surefoot.story.incident_block import action_lines, incident_title
from surefoot.story.incident_story import BranchRow, IncidentStory, TrialTable

MAX_INCIDENTS = 60
"""Incidents that the page tells in full; of more, the first ones and the last."""
MAX_EVIDENCE = 10
MAX_ADVICE = 8
MAX_CHECKPOINTS = 40


def as_page(report: RunReport) -> str:
    """The complete page."""
    return html_document(f"{report.verdict}: {report.story.path}", "".join(_body(report)))


def _body(report: RunReport) -> Iterator[str]:
    yield f'<span class="verdict {report.verdict}">{report.verdict.upper()}</span>'
    yield f"<h1>{escape_text(report.sentence)}</h1>"
    yield f'<p class="faint">{escape_text(report.story.path)}{_dates(report)}</p>'
    yield html_table(report.facts)
    yield from _advice(report)
    yield from _curves(report)
    yield from _incidents(report)
    yield from _flow(report.flow)
    yield from _checkpoints(report)
    yield from _checklists(report)
    settings = report.settings()
    if settings:
        yield f"<h2>Settings and environment</h2><details open><summary>{len(settings)} entries of run.json</summary>"
        yield f"{html_table(settings)}</details>"
    notes = [*report.story.notes, *report.diagnosis.notes]
    if notes:
        yield f"<h2>Notes</h2><ul>{list_items(dict.fromkeys(notes))}</ul>"


def _dates(report: RunReport) -> str:
    start, end = report.story.started, report.story.updated
    if not start:
        return ""
    until = f" to {_date(end)}" if end else ""
    return f" · {_date(start)}{until} UTC"


def _date(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return "an unknown time"


def _advice(report: RunReport) -> Iterator[str]:
    steps = ordered_advice(report.diagnosis.causes[:3], MAX_ADVICE)
    if steps and report.diagnosis.is_trouble:
        yield f'<h2>What to do, in this order</h2><ol class="do">{list_items(steps)}</ol>'


def _curves(report: RunReport) -> Iterator[str]:
    drawn = draw_svg(
        chart_panels(report.run), title=report.sentence, unit="attempt", marks=chart_marks(report.story.incidents)
    )
    if drawn:
        yield f"<h2>Curves</h2><figure>{drawn}</figure>"
        yield '<p class="faint">Over attempted updates, which go on through a rewind. Dotted lines: incidents, by '
        yield "their number below. Shaded: not finite. Of each stretch the lowest, the highest and any "
        yield "non-finite value are drawn.</p>"


# -- incidents


def _incidents(report: RunReport) -> Iterator[str]:
    incidents = list(enumerate(report.story.incidents, 1))
    yield f"<h2>Incidents</h2>{'' if incidents else '<p>None.</p>'}"
    left_out = len(incidents) - MAX_INCIDENTS
    if left_out > 0:
        yield f"<p>{left_out} incidents in the middle are left out; --markdown and --json of diagnose have them.</p>"
        incidents = [*incidents[: MAX_INCIDENTS // 2], *incidents[-MAX_INCIDENTS // 2 :]]
    for number, incident in incidents:
        yield from _incident(number, incident)


def _incident(number: int, incident: IncidentStory) -> Iterator[str]:
    yield f'<div class="incident {incident.level}"><h3>{number}. {escape_text(_capital(incident_title(incident)))}</h3>'
    rows: list[tuple[str, str]] = [("when", when_text(incident))]
    rows += incident.place.parts()
    if incident.outcome:
        rows.append(("result", incident.outcome))
    if incident.bundle:
        rows.append(("bundle", f"{incident.bundle} in the run directory"))
    yield html_table(rows)
    cause = incident.first_cause
    if cause is not None and cause.evidence:
        yield f"<h4>Why: {escape_text(cause.named)}</h4><ul>{list_items(cause.evidence[:MAX_EVIDENCE])}</ul>"
    elif incident.findings:
        yield f"<h4>What was found</h4><ul>{list_items(f.detail for f in incident.findings[:MAX_EVIDENCE])}</ul>"
    if len(incident.causes) > 1:
        others = (f"{other.named}: {other.evidence[0] if other.evidence else ''}" for other in incident.causes[1:4])
        yield f"<h4>Less likely</h4><ul>{list_items(others)}</ul>"
    if incident.actions:
        yield f"<h4>What surefoot did</h4><ul>{list_items(action_lines(incident))}</ul>"
    for trial in incident.trials:
        yield from _trial(trial)
    if cause is not None and cause.advice:
        yield f"<details><summary>What to change</summary><ol>{list_items(cause.advice)}</ol>"
        yield f'<p class="faint">{escape_text(incident.path)}</p></details>' if incident.path else "</details>"
    yield "</div>"


def when_text(incident: IncidentStory) -> str:
    """Step, attempt and time of an incident."""
    when = f"step {incident.step:,}, attempt {incident.attempt:,}"
    until = f" to attempt {incident.last_attempt:,}" if incident.last_attempt > incident.attempt else ""
    return f"{when}{until}{f', {_date(incident.time)} UTC' if incident.time else ''}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _trial(trial: TrialTable) -> Iterator[str]:
    if not trial.branches:
        yield f'<p class="faint">Trial at step {trial.step:,}: {escape_text(trial.sentence)}</p>'
        return
    known = math.isfinite(trial.reference)
    before = f"; at the snapshot it was {trial.reference:.4g}" if known else ""
    yield f"<h4>Trial: the loss on {trial.probes} probe batches after each branch{before}</h4>"
    head = '<tr><th>branch</th><th class="number">updates</th><th class="number">probe loss</th></tr>'
    body = "".join(
        f"<tr{_chosen(row, ' class=chosen')}><th>{escape_text(row.text)}{_chosen(row, ' (chosen)')}</th>"
        f'<td class="number">{row.steps:,}</td><td class="number">{loss_text(row.probe_loss)}</td></tr>'
        for row in trial.branches
    )
    yield f'<div class="tables"><table>{head}{body}</table></div>'


def _chosen(row: BranchRow, text: str) -> str:
    return text if row.chosen else ""


def loss_text(loss: float) -> str:
    return f"{loss:.4g}" if math.isfinite(loss) else "not finite"


# -- the rest


def _flow(flow: GradientFlow | None) -> Iterator[str]:
    drawn = "" if flow is None else flow_svg(flow)
    if flow is None or not drawn:
        return
    yield f"<h2>Gradient flow</h2><figure>{drawn}</figure>"
    more = f" (the first {MAX_LISTED} of {len(flow.tensors):,})" if len(flow.tensors) > MAX_LISTED else ""
    yield f'<details><summary>The same in numbers{more}</summary><div class="tables">'
    yield f"{html_table(flow_rows(flow), head=('tensor', *(line.name for line in flow.lines)))}</div></details>"


def _checkpoints(report: RunReport) -> Iterator[str]:
    checkpoints = report.story.checkpoints
    yield "<h2>Checkpoints</h2>"
    if not checkpoints:
        yield "<p>None was saved: attach with resume=True saves the run as it trains.</p>"
        return
    if len(checkpoints) > MAX_CHECKPOINTS:
        yield f"<p>{len(checkpoints)} were saved; the newest:</p>"
    rows = (
        (
            f"step {c.step:,}",
            f"{_date(c.time)} UTC",
            "on disk" if c.on_disk else "removed since",
            c.health or "not marked",
        )
        for c in checkpoints[-MAX_CHECKPOINTS:]
    )
    yield html_table(rows, head=("checkpoint", "saved", "", "health"))


def _checklists(report: RunReport) -> Iterator[str]:
    yield f"<h2>Checklist: during the run</h2>{_checklist(report.during)}"
    yield "<h2>Checklist: after a crash</h2>"
    nothing = "<p>Nothing to answer: the run has neither crashed nor been resumed.</p>"
    yield _checklist(report.after_crash) if report.after_crash else nothing


def _checklist(items: Sequence[CheckedItem]) -> str:
    return f"<table>{''.join(_checked_rows(items))}</table>"


def _checked_rows(items: Iterable[CheckedItem]) -> Iterator[str]:
    for checked in items:
        style = {CheckAnswer.YES: "yes", CheckAnswer.NO: "no"}.get(checked.answer, "dim")
        yield f'<tr><th>{escape_text(checked.item)}</th><td class="{style}">{checked.answer}</td>'
        yield f"<td>{escape_text(checked.figure)}</td></tr>"
