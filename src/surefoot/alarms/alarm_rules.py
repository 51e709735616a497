"""Which events of a journal are alarms, of which level, and in which words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefoot.alarms.alarm import Alarm
from surefoot.alarms.alarm_target import AlarmLevel
from surefoot.records import Action, Severity
from surefoot.sinks.narrator import EventNarrator

_MAX_LINES = 12
_MAX_EVENTS = 10
_MAX_TITLE = 160
_ADVICE_LINES = 2
_ORDER = tuple(AlarmLevel)
_CHANGES = (Action.CONSTRAIN, Action.REWIND)
_NOTE_LEVELS = {
    "exception": AlarmLevel.CRASH,
    "degraded": AlarmLevel.CRASH,
    "failed": AlarmLevel.ACTION,
    "journal_lost": AlarmLevel.SEVERE,
}
_NOTE_WORDS = {
    "exception": "the training loop failed",
    "degraded": "surefoot's protection is OFF, training goes on",
    "failed": "a remedy could not be carried out",
    "journal_lost": "rows or events were lost",
}
_PLANNED_ENDS = ("TrainingStopped", "SystemExit")
_CHECKPOINT_LEVELS = {"failed": AlarmLevel.SEVERE, "stopped": AlarmLevel.STOP}
_CHECKPOINT_WORDS = {"failed": "a checkpoint was not saved", "stopped": "saved and ended after a signal"}


def level_of(event: Mapping[str, Any]) -> AlarmLevel | None:
    """The level of an event; None if it says nothing to a person who is away."""
    level: AlarmLevel | None = None
    match event.get("kind"):
        case "finding":
            level = AlarmLevel.SEVERE if event.get("severity") == Severity.SEVERE else AlarmLevel.FINDING
        case "decision":
            level = _level_of_decision(str(event.get("action")), applied=bool(event.get("applied", True)))
        case "outcome":
            level = AlarmLevel.ACTION
        case "note" if is_planned_end(event):
            level = AlarmLevel.STOP if str(event["detail"]).startswith("SystemExit") else None
        case "note":
            level = _NOTE_LEVELS.get(str(event.get("name")))
        case "checkpoint":
            level = _CHECKPOINT_LEVELS.get(str(event.get("name")))
    return level


def _level_of_decision(action: str, *, applied: bool) -> AlarmLevel | None:
    if action == Action.STOP:
        return AlarmLevel.STOP if applied else AlarmLevel.SEVERE
    if action in _CHANGES and applied:
        return AlarmLevel.ACTION
    return None if action == Action.RELAX else AlarmLevel.FINDING


def is_planned_end(event: Mapping[str, Any]) -> bool:
    """Whether an exception only carries the end of the run: by surefoot, which another event tells of, or an exit."""
    return event.get("name") == "exception" and str(event.get("detail")).startswith(_PLANNED_ENDS)


class AlarmGroup:
    """Events that came together, such as a finding, its cause and the decision: one alarm."""

    def __init__(self) -> None:
        self._events: list[Mapping[str, Any]] = []
        self._lines: list[str] = []
        self._top: tuple[int, Mapping[str, Any], str] | None = None
        """The order of the most serious level so far, with the first event of it and its line."""
        self._narrator = EventNarrator(self._add_line, include_advice=False)  # an alarm has all of it

    def _add_line(self, step: int, label: str, text: str, style: str | None) -> None:
        self._lines.append(f"{label}: {text}")

    def add(self, event: Mapping[str, Any]) -> None:
        level, before = level_of(event), len(self._lines)
        if (line := _own_line(event)) is not None:
            self._lines += [line] if line else []
        else:
            self._narrator.on_event(event)
        if event.get("kind") == "diagnosis":
            self._lines += [f"try: {text}" for text in list(event.get("advice", ()))[:_ADVICE_LINES]]
        elif level is None:
            return
        self._events.append(event)
        if level is not None and (self._top is None or _ORDER.index(level) < self._top[0]):
            first = self._lines[before] if len(self._lines) > before else str(event.get("detail", ""))
            self._top = _ORDER.index(level), event, first

    def take(self) -> Alarm | None:
        """The alarm of all events since the last call."""
        top, lines, events = self._top, list(dict.fromkeys(self._lines)), self._events
        self._top, self._events = None, []
        self._lines.clear()
        if top is None:
            return None
        place, event, line = top
        more = f"\n... and {len(lines) - _MAX_LINES} more" if len(lines) > _MAX_LINES else ""
        step, rank = int(event.get("step", -1)), int(event.get("rank", 0))
        where = f"step {step}" + (f", rank {rank}" if rank else "")
        return Alarm(
            level=_ORDER[place],
            key=f"{_ORDER[place]} {_what(event)} {rank or ''}".strip(),
            title=_cut(f"{where}: {line}", _MAX_TITLE),
            text="\n".join(lines[:_MAX_LINES]) + more,
            step=step,
            rank=rank,
            events=tuple(events[:_MAX_EVENTS]),
        )


def _what(event: Mapping[str, Any]) -> str:
    """What kind of event it is, without its numbers."""
    names = ("kind", "detector", "action", "name", "remedy_id", "helped")
    return " ".join(str(event[name]) for name in names if event.get(name) is not None)


def _own_line(event: Mapping[str, Any]) -> str | None:
    """The line of an event that a console leaves to others: the caller of the loop, or the header."""
    if is_planned_end(event):
        return f"the process was told to end: {event['detail']}" if level_of(event) else ""
    kind, name, detail = event.get("kind"), str(event.get("name")), str(event.get("detail", ""))
    if kind == "decision" and event.get("action") == Action.STOP and event.get("applied", True):
        return f"surefoot stopped the run: {event.get('reason', '')}"
    words = {"note": _NOTE_WORDS, "checkpoint": _CHECKPOINT_WORDS}.get(str(kind), {}).get(name)
    return None if words is None else f"{words}: {detail}"


def _cut(text: str, length: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 3] + "..."
