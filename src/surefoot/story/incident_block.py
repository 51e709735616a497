"""An incident as a short block of text: cause, evidence, what was done, whether it helped, where to read on."""

from __future__ import annotations

from collections.abc import Iterator

from surefoot.records import Action, Cause
from surefoot.story.action_sentences import lost_text
from surefoot.story.incident_story import IncidentLevel, IncidentStory, TakenAction

MAX_ACTIONS = 4
"""Actions that a block lists; of more, the last ones."""


def incident_title(incident: IncidentStory) -> str:
    """When, and why."""
    cause = incident.first_cause
    unclear = cause is None or cause.cause is Cause.UNKNOWN
    why = incident.what if unclear and incident.what else incident.cause_text
    return f"step {incident.step:,}: {why}"


def incident_lines(incident: IncidentStory, run_dir: str) -> Iterator[tuple[str, str]]:
    """The lines of the block below its title, each with its label."""
    cause = incident.first_cause
    evidence = [line for line in (cause.evidence if cause else ()) if line not in incident_title(incident)]
    if cause is None or cause.cause is Cause.UNKNOWN:
        yield "cause", "the numbers do not show it"
    if evidence:
        yield "evidence", evidence[0]
    place = [(name, text) for name, text in incident.place.parts() if text not in "".join(evidence[:1])]
    if place:
        yield "where", "; ".join(f"{name} {text}" for name, text in place if name != "code")
    if len(incident.actions) > MAX_ACTIONS:
        yield "done", f"{len(incident.actions) - MAX_ACTIONS} earlier actions"
    for action in incident.actions[-MAX_ACTIONS:]:
        yield "done", _action_line(action, with_reason=action.action == Action.STOP)
    if not incident.actions:
        yield "done", "nothing: no action was needed" if incident.level is IncidentLevel.SUSPECTED else "only reported"
    if incident.outcome:
        yield "result", incident.outcome
    if cause is not None and cause.advice:
        yield "to do", cause.advice[0]
    more = f"surefoot diagnose {run_dir}" if run_dir else ""
    bundle = f"{run_dir}/{incident.bundle}" if incident.bundle and run_dir else incident.bundle
    if more or bundle:
        yield "more", "; ".join(filter(None, (bundle, more)))


def incident_block(incident: IncidentStory, run_dir: str = "") -> str:
    """The whole block."""
    lines = [f"  {label + ':':10}{text}" for label, text in incident_lines(incident, run_dir)]
    return "\n".join([incident_title(incident), *lines])


def incident_sentence(incident: IncidentStory, *, others: int = 0) -> str:
    """The incident in one or two sentences, as a headline says it."""
    title = incident_title(incident)
    parts = [f"S{title[1:]}"]
    last = next((a for a in reversed(incident.actions) if a.action != Action.RELAX), None)
    if last is not None:
        parts.append(f"surefoot {last.sentence.partition(';')[0]}")
    if incident.outcome and incident.outcome != "the run was stopped":
        parts.append(incident.outcome)
    more = f" ({others} more {'incident' if others == 1 else 'incidents'})" if others > 0 else ""
    return f"{'; '.join(parts)}{more}."


def action_lines(incident: IncidentStory) -> list[str]:
    """What was done, each with what it cost and why."""
    return [_action_line(action, with_reason=True) for action in incident.actions]


def branch_lines(incident: IncidentStory) -> list[str]:
    """The branches of its trials, each with its probe loss."""
    rows = [row for trial in incident.trials for row in trial.branches]
    return [f"{row.text}: probe loss {row.probe_loss:.4g}{' (chosen)' if row.chosen else ''}" for row in rows]


def _action_line(action: TakenAction, *, with_reason: bool) -> str:
    cost = lost_text(action.updates_lost, action.updates_kept)
    because = f", because {action.reason}" if with_reason and action.reason else ""
    return f"step {action.step:,}: {action.sentence}{f' ({cost})' if cost else ''}{because}"
