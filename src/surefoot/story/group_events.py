"""Which events of a run belong to the same incident: an incident ends with its outcome, or when it has become quiet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from surefoot.judge.diagnosis import MACHINE_DETECTORS
from surefoot.judge.thresholds import BASELINE_ROWS, WINDOW_ROWS
from surefoot.records import Action, FindingKind, Severity

EventFields = Mapping[str, Any]
"""An event as the journal holds it."""
REFUSALS_TOGETHER = 100
"""Attempts within which a further refusal belongs to the same incident, as in an incident bundle."""
REFUSAL_DETECTORS = frozenset[str]({FindingKind.NONFINITE, FindingKind.NORM_OUTLIER, FindingKind.ORIGIN})
INCIDENT_NOTES = frozenset({"rewound", "failed", "incident", "tensors", "buffers", "origin"})
"""Notes that tell something about an incident."""
CHANGING = frozenset[str]({Action.REWIND, Action.CONSTRAIN, Action.ACCEPT})
"""Decisions whose outcome is awaited, or that end an incident."""


@dataclass(slots=True)
class EventGroup:
    """The events of one incident, in order."""

    events: list[EventFields] = field(default_factory=list)
    reported_only: bool = False
    """Nothing is wrong with the training."""
    diagnosed: bool = False
    outcome_pending: bool = False
    """Something was done, and it is not known yet whether it helped."""
    closed: bool = False
    first_attempt: int = -1
    last_attempt: int = -1
    refusals_only: bool = True
    num_diagnosed: int = 0
    """Events up to the end of the diagnosis: the judge makes one for each incident."""
    diagnosed_attempt: int = -1

    def split(self) -> EventGroup:
        """Take away what came after the diagnosis: the judge has made it another incident."""
        later = EventGroup()
        for event in self.events[self.num_diagnosed :]:
            later.add(event)
        del self.events[self.num_diagnosed :]
        self.last_attempt = max(whole(event.get("attempt")) for event in self.events)
        self.outcome_pending, self.closed = False, True
        return later

    def add(self, event: EventFields) -> None:
        attempt = whole(event.get("attempt"))
        if not self.events:
            self.first_attempt = attempt
        self.events.append(event)
        if event.get("action") != Action.RELAX:  # a late consequence
            self.last_attempt = max(self.last_attempt, attempt)
        kind, action = event.get("kind"), event.get("action")
        if kind == "diagnosis":
            self.diagnosed, self.diagnosed_attempt, self.num_diagnosed = True, attempt, len(self.events)
        if kind == "finding":
            self.refusals_only &= event.get("detector") in REFUSAL_DETECTORS
        elif kind == "decision" and action not in (Action.REFUSE, Action.RELAX):
            self.refusals_only = False
            applied = bool(event.get("applied", True))
            self.outcome_pending |= applied and action in CHANGING and action != Action.ACCEPT
            self.closed |= applied and action in (Action.STOP, Action.ACCEPT)
        elif kind == "note" and event.get("name") == "failed":
            self.outcome_pending = False
        elif kind == "outcome":
            self.outcome_pending = False
            self.closed = bool(event.get("helped", False))

    def takes(self, event: EventFields) -> bool:
        """Whether a further finding, diagnosis or decision is about the same incident."""
        apart = whole(event.get("attempt")) - self.last_attempt
        if self.closed:
            return False
        if self.outcome_pending:
            return True
        if self.refusals_only and (event.get("detector") in REFUSAL_DETECTORS or event.get("action") == Action.REFUSE):
            return apart <= REFUSALS_TOGETHER
        return apart <= (WINDOW_ROWS if self.diagnosed else BASELINE_ROWS)


class EventGrouper:
    """Takes the events of a run in order and sorts them into incidents; the last group may still grow."""

    def __init__(self) -> None:
        self.groups: list[EventGroup] = []
        self._current: EventGroup | None = None
        self._report: EventGroup | None = None
        """The last findings that were only reported."""
        self._diagnosed: EventGroup | None = None
        """What the last diagnosis was about: the further causes that follow it carry no evidence."""

    @property
    def open(self) -> EventGroup | None:
        """The incident that is going on, if any."""
        current = self._current
        return None if current is None or current.closed else current

    def add(self, event: EventFields) -> EventGroup | None:
        """Take one event; the group that it belongs to, None if it is about no incident."""
        kind = event.get("kind")
        if kind == "finding":
            group = self._report_of(event) if is_report(event) else self._incident_of(event)
        elif kind == "diagnosis":
            group = self._group_of_diagnosis(event)
        elif kind == "decision":
            relaxed = event.get("action") == Action.RELAX
            group = self._last_incident() if relaxed else self._incident_of(event)
        elif kind in ("outcome", "trial") or (kind == "note" and event.get("name") in INCIDENT_NOTES):
            group = self._current
        else:
            if kind == "note" and event.get("name") == "attached":  # another process: nothing goes on any more
                self._current = self._report = self._diagnosed = None
            return None
        if group is not None:
            group.add(event)
        return group

    def forget(self, group: EventGroup) -> None:
        """A group whose story was told: nothing more is kept of it, unless it is still going on."""
        self.groups = [other for other in self.groups if other is not group]
        if group is self._current and group.closed:
            self._current = None

    def _new(self, *, reported_only: bool = False) -> EventGroup:
        group = EventGroup(reported_only=reported_only)
        self.groups.append(group)
        return group

    def _last_incident(self) -> EventGroup | None:
        return next((group for group in reversed(self.groups) if not group.reported_only), None)

    def _incident_of(self, event: EventFields) -> EventGroup:
        if self._current is None or not self._current.takes(event):
            self._current = self._new()
        return self._current

    def _report_of(self, event: EventFields) -> EventGroup:
        if self._report is None or self._report.last_attempt != whole(event.get("attempt")):
            self._report = self._new(reported_only=True)
        return self._report

    def _group_of_diagnosis(self, event: EventFields) -> EventGroup:
        evidence = event.get("evidence")
        attempt, last = whole(event.get("attempt")), self._diagnosed
        if not evidence and last is not None and last.last_attempt == attempt:
            return last
        named = evidence.get("findings") if isinstance(evidence, Mapping) else None
        report = self._report
        if report is not None and report.last_attempt == attempt and named:
            reported = {finding.get("detector") for finding in report.events}
            self._diagnosed = report if set(map(str, named)) <= reported else None
        else:
            self._diagnosed = None
        self._diagnosed = self._diagnosed or self._diagnosed_again(event) or self._incident_of(event)
        return self._diagnosed

    def _diagnosed_again(self, event: EventFields) -> EventGroup | None:
        """The judge diagnoses an incident once: a second time, with nothing done in between, it is another one."""
        current, evidence = self._current, event.get("evidence")
        if current is None or not current.diagnosed or current.outcome_pending or not isinstance(evidence, Mapping):
            return None
        if "trial" in evidence or whole(event.get("attempt")) <= current.diagnosed_attempt:
            return None
        if any(e.get("kind") == "decision" and e.get("action") in CHANGING for e in current.events):
            return None
        self._current = current.split()
        self.groups.append(self._current)
        return self._current


def is_report(finding: EventFields) -> bool:
    """Whether a finding is only reported; versions before severities have their machine detectors in this role."""
    severity = finding.get("severity")
    return finding.get("detector") in MACHINE_DETECTORS if severity is None else severity == Severity.REPORT_ONLY


def whole(value: Any) -> int:
    """A step or attempt; -1 for what is none."""
    return int(value) if isinstance(value, int | float) and abs(value) < 1e15 else -1
