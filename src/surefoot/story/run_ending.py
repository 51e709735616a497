"""How a run has ended, or that it goes on, its health, and both in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from surefoot.records import Action
from surefoot.story.group_events import EventFields
from surefoot.story.incident_story import IncidentLevel, IncidentStory
from surefoot.story.row_facts import RowLookup
from surefoot.story.run_story import RunStory, RunVerdict
from surefoot.story.tell_incident import NOT_KNOWN

UNKNOWN_OUTCOME = "not known: the run ended before it showed"


def how_it_ended(events: Sequence[EventFields], *, alive: bool | None, closed: bool = False) -> tuple[RunVerdict, str]:
    """Whether the run goes on, and how it has ended, in words; HEALTHY stands for an end without an error."""
    start = max((k for k, event in enumerate(events) if event.get("name") == "attached"), default=0)
    since = events[start:]
    stop = [e for e in since if e.get("action") == Action.STOP and e.get("kind") == "decision" and e.get("applied")]
    error = next((e for e in since if e.get("name") == "exception"), None)
    if stop:
        return RunVerdict.FAILED, f"surefoot stopped the run: {str(stop[-1].get('reason') or '').rstrip('.')};"
    if error is not None:
        return RunVerdict.FAILED, f"ended in an error: {error.get('detail')};"
    if closed or any(e.get("name") == "closed" for e in since):
        return RunVerdict.HEALTHY, "ended"
    if alive:
        return RunVerdict.RUNNING, "running,"
    return RunVerdict.KILLED, "its process ended without closing the run,"


def ended_before(incident: IncidentStory) -> IncidentStory:
    """What is not known yet when a run ends will never be."""
    return replace(incident, outcome=UNKNOWN_OUTCOME) if incident.outcome == NOT_KNOWN else incident


def health_of(ending: RunVerdict, incidents: Sequence[IncidentStory], rows: RowLookup) -> RunVerdict:
    """Healthy, warning or failed."""
    if ending is RunVerdict.FAILED:
        return RunVerdict.FAILED
    done = [i for i in incidents if i.level in (IncidentLevel.REFUSED, IncidentLevel.ACTED, IncidentLevel.STOPPED)]
    if not done:
        return RunVerdict.HEALTHY
    last = max(done, key=lambda incident: incident.attempt)
    unresolved = last.helped is False or (last.helped is None and rows.ends_refused)
    return RunVerdict.FAILED if unresolved and ending is not RunVerdict.RUNNING else RunVerdict.WARNING


def run_sentence(story: RunStory) -> str:
    """How it ended, the incident that counts, and the loss; the headline without its first word."""
    parts = [f"{story.ended} at step {story.last_step:,}" if story.last_step is not None else story.ended]
    done = [i for i in story.incidents if i.level not in (IncidentLevel.REPORTED, IncidentLevel.SUSPECTED)]
    if story.main is not None:
        count = "1 incident" if len(done) == 1 else f"{len(done)} incidents"
        which = "" if len(done) == 1 else ("the last: " if story.main is done[-1] else "the first: ")
        parts.append(f"{count} ({which}{story.main.cause_text} at step {story.main.step:,})")
    if story.last_loss is not None:
        parts.append(f"loss {story.last_loss:.4g}")
    return "; ".join(parts)
