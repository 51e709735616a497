"""The verdict on a run that is followed, and its incidents, by the rules of the story of a run that was read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from surefoot.logs.log_diagnosis import RunHealth
from surefoot.logs.report.wording import clean
from surefoot.story.group_events import EventFields, EventGrouper
from surefoot.story.incident_block import action_lines, incident_title
from surefoot.story.incident_story import IncidentLevel, IncidentStory
from surefoot.story.row_facts import APPLIED_TO_CONFIRM, RowLookup
from surefoot.story.run_ending import ended_before, health_of, how_it_ended, run_sentence
from surefoot.story.run_story import RunStory, RunVerdict
from surefoot.story.tell_incident import NOT_KNOWN, tell_incident
from surefoot.watch.current_numbers import CurrentNumbers
from surefoot.watch.run_state import RunState, StateReport

TROUBLE = frozenset[str]({RunVerdict.WARNING, RunVerdict.FAILED, RunVerdict.KILLED})


@dataclass(frozen=True, slots=True)
class LiveVerdict:
    """The run in one word and in a sentence, with the story they rest on."""

    verdict: RunVerdict | RunHealth
    """The health, unless the process was killed, or nothing is known yet."""
    sentence: str
    story: RunStory

    @property
    def health(self) -> RunVerdict:
        return self.story.health

    @property
    def incidents(self) -> tuple[IncidentStory, ...]:
        """Without those that were only reported: these are among the events."""
        return tuple(i for i in self.story.incidents if i.level is not IncidentLevel.REPORTED)


class LiveIncidents:
    """The incidents of a run that is followed; one whose story is complete is not told again."""

    def __init__(self) -> None:
        self._grouper = EventGrouper()
        self._told: list[tuple[int, IncidentStory]] = []
        """The story of each group, with the number of its events; -1 where it may still change."""

    def take_in(self, events: Iterable[EventFields]) -> None:
        for event in events:
            self._grouper.add(event)

    def tell(self, rows: RowLookup) -> tuple[IncidentStory, ...]:
        for at, group in enumerate(self._grouper.groups):
            if at < len(self._told) and self._told[at][0] == len(group.events):
                continue
            incident = tell_incident(group, rows)
            settled = rows.last_attempt >= group.last_attempt + APPLIED_TO_CONFIRM and incident.outcome != NOT_KNOWN
            self._told[at : at + 1] = [(len(group.events) if settled else -1, incident)]
        return tuple(incident for _, incident in self._told)


def verdict_of(
    events: Sequence[EventFields],
    incidents: tuple[IncidentStory, ...],
    rows: RowLookup,
    numbers: CurrentNumbers,
    state: StateReport,
) -> LiveVerdict:
    """How the run is, given what is known of its process."""
    alive, closed = state.state is RunState.RUNNING, state.state is RunState.ENDED
    ending, ended = how_it_ended(events, alive=alive, closed=closed)
    if ending is not RunVerdict.RUNNING:
        incidents = tuple(map(ended_before, incidents))
    health = health_of(ending, incidents, rows)
    story = RunStory(
        path="",
        verdict=ending if ending in (RunVerdict.RUNNING, RunVerdict.KILLED) else health,
        health=health,
        headline="",
        ended=ended,
        last_step=numbers.step if numbers.step >= 0 else None,
        incidents=incidents,
    )
    sentence = clean(run_sentence(story))
    if state.state is RunState.DELETED:
        return LiveVerdict(RunHealth.UNKNOWN, "the run directory was deleted; shown is what was read before", story)
    if ending is RunVerdict.KILLED:
        return LiveVerdict(ending, f"{sentence}; {clean(state.detail)}", story)
    if numbers.step < 0 and health is RunVerdict.HEALTHY:
        return LiveVerdict(RunHealth.UNKNOWN, f"no update yet; {clean(state.detail)}", story)
    return LiveVerdict(health, sentence, story)


def incidents_json(verdict: LiveVerdict) -> dict[str, Any]:
    """The incidents as in the JSON of a story, each with its title and what was done in words; and which one counts."""
    shown, main = verdict.incidents, verdict.story.main
    return {
        "incidents": [_incident_json(incident) for incident in shown],
        "main": None if main is None else shown.index(main),
    }


def _incident_json(incident: IncidentStory) -> dict[str, Any]:
    values = replace(incident, findings=()).as_json()  # they are among the events
    return values | {"title": incident_title(incident), "done": action_lines(incident)}
