"""Logs each incident of a live run once, as a short block, when it is known whether what was done has helped."""

from __future__ import annotations

import logging
from collections import Counter

from surefoot.judge.thresholds import WINDOW_ROWS
from surefoot.records import EVENT_MARK, Action, Cause, Event, StepMetrics
from surefoot.story.group_events import EventGroup, EventGrouper
from surefoot.story.incident_block import incident_block, incident_title
from surefoot.story.incident_story import IncidentLevel, IncidentStory
from surefoot.story.row_facts import RowFacts
from surefoot.story.tell_incident import NOT_KNOWN, tell_incident
from surefoot.story.verbosity import Verbosity

log = logging.getLogger("surefoot")
LONGEST_WAIT = 64
"""Attempts after the first event of an incident, after which its block is logged even if its outcome is not known."""
_LEVELS = {
    IncidentLevel.REPORTED: logging.INFO,
    IncidentLevel.SUSPECTED: logging.INFO,
    IncidentLevel.REFUSED: logging.WARNING,
    IncidentLevel.ACTED: logging.WARNING,
    IncidentLevel.STOPPED: logging.WARNING,
}
ESCALATIONS = (Action.REWIND, Action.CONSTRAIN, Action.ACCEPT, Action.STOP)
_ENDS = frozenset({"closed", "exception"})


class IncidentLog:
    """A listener of the journal. While `waiting`, it has to be given every row."""

    def __init__(self, run_dir: str, verbosity: Verbosity) -> None:
        self.waiting = False
        """An incident was not logged yet, or its outcome was not known when it was."""
        self._run_dir, self._quiet = run_dir, verbosity is Verbosity.QUIET
        self._grouper = EventGrouper()
        self._rows = RowFacts()
        self._logged: dict[int, IncidentStory] = {}
        """Incidents that were logged before their outcome was known, by the id of their group."""
        self._times: Counter[tuple[str, str]] = Counter()
        """Incidents by cause and level."""

    def on_event(self, event: Event) -> None:
        fields = event.as_json()
        group = self._grouper.add(fields)
        if group is not None:
            if group not in self._grouper.groups and fields["kind"] == "decision" and fields["action"] in ESCALATIONS:
                self._grouper.groups.append(group)  # it was logged, and more is done about it now
            self.waiting = True
            if fields.get("action") == Action.STOP and group.closed:
                self._finish(group)
        elif fields.get("name") in _ENDS:
            self._finish_all()

    def row_read(self, row: StepMetrics) -> None:
        """A row was read and judged; an error here never reaches the training."""
        try:
            self._rows.add(row)
            for group in tuple(self._grouper.groups):
                if self._is_ready(group, row.attempt):
                    self._finish(group)
            if not self._grouper.groups:
                self.waiting, self._rows = False, RowFacts()
        except Exception as error:
            self.waiting = False
            log.error("surefoot: incidents are no longer logged, training and protection go on: %r", error)

    def _is_ready(self, group: EventGroup, attempt: int) -> bool:
        """Whether nothing more is to be told about an incident for now."""
        if group.closed or group.reported_only:
            return True
        if id(group) in self._logged:  # only its outcome is missing
            return not group.outcome_pending and attempt - group.last_attempt > WINDOW_ROWS
        if attempt - group.first_attempt > LONGEST_WAIT:
            return True
        quiet = attempt - group.last_attempt
        if group.outcome_pending or quiet < WINDOW_ROWS // 2:
            return False
        return group.diagnosed or quiet > 2 * WINDOW_ROWS

    def _finish_all(self) -> None:
        for group in tuple(self._grouper.groups):
            self._finish(group)

    def _finish(self, group: EventGroup) -> None:
        """Log an incident, or the outcome of one that was logged; keep it while its outcome is awaited."""
        incident = tell_incident(group, self._rows)
        before = self._logged.pop(id(group), None)
        if before is None or incident.level is IncidentLevel.STOPPED:
            self._log_block(incident)
        elif incident.outcome != before.outcome and incident.outcome:
            log.log(self._level(incident), "surefoot: %s: %s", incident_title(incident), incident.outcome, extra=_MARK)
        if incident.outcome == NOT_KNOWN and not group.closed:
            self._logged[id(group)] = incident
        else:
            self._grouper.forget(group)

    def _log_block(self, incident: IncidentStory) -> None:
        cause = incident.first_cause
        key = str(Cause.UNKNOWN if cause is None else cause.cause), incident.level.value
        self._times[key] += 1
        times, level = self._times[key], self._level(incident)
        seldom = times & (times - 1)  # the 1st, 2nd, 4th, 8th ... of a kind are logged
        again = f" (the {times}th of this kind; those in between are in the journal)" if times > 2 else ""
        if seldom and incident.level is not IncidentLevel.STOPPED:
            level = logging.DEBUG
        log.log(level, "surefoot: %s%s", incident_block(incident, self._run_dir), again, extra=_MARK)

    def _level(self, incident: IncidentStory) -> int:
        if self._quiet and incident.level is not IncidentLevel.STOPPED and incident.helped is not False:
            return logging.DEBUG
        only_observed = any(not action.applied for action in incident.actions)
        if only_observed or any(not action.done for action in incident.actions):
            return logging.WARNING
        return _LEVELS[incident.level]


_MARK = {EVENT_MARK: True}
