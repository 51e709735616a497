"""Events as they are appended, and the short lines for people made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.journal.aliases import upgraded_event
from surefoot.journal.event_order import EventKey, EventOrder
from surefoot.journal.row_file import file_size
from surefoot.journal.strict_json import loads_object
from surefoot.logs.report.wording import clean
from surefoot.records import Action
from surefoot.sinks.narrator import EventNarrator

_DEFAULTS = {"kind": "note", "step": -1, "attempt": -1, "rank": 0, "time": 0.0}
_WORDS = frozenset({"kind", "name", "action", "cause", "detector", "severity"})
_MAX_READ = 1 << 26
"""Bytes read at once."""
_TEXT = 400
_LABELLED_CHECKPOINTS = {"saved": "saved", "failed": "failed", "resumed": "resumed", "inexact": "resumed"}


@dataclass(frozen=True, slots=True)
class EventLine:
    """One line of the list of events; `text` holds no control characters."""

    step: int
    attempt: int
    label: str
    text: str
    time: float


class EventTail:
    """Reads the events files from where it last stopped; a torn last line waits until it is complete."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._positions: dict[str, int] = {}
        self._orders: dict[str, EventOrder] = {}
        self._keyed: list[tuple[EventKey, dict[str, Any]]] = []
        self.events: list[dict[str, Any]] = []
        """All events, in the order in which `surefoot.read` has them."""
        self.rearranged = False
        """Whether the last refresh read events that belong before earlier ones, as a slow rank writes them."""

    def refresh(self) -> list[dict[str, Any]]:
        """The new events, in their order."""
        new: list[tuple[EventKey, dict[str, Any]]] = []
        for path in sorted(self._run_dir.glob("events*.jsonl")):
            new += self._read(path)
        new.sort(key=_key)
        self.rearranged = bool(new and self._keyed and new[0][0] < self._keyed[-1][0])
        self._keyed += new
        if self.rearranged:
            self._keyed.sort(key=_key)
            self.events = [event for _, event in self._keyed]
        else:
            self.events += (event for _, event in new)
        return [event for _, event in new]

    def _read(self, path: Path) -> list[tuple[EventKey, dict[str, Any]]]:
        position = self._positions.get(path.name, 0)
        if file_size(path) <= position:
            return []
        with path.open("rb") as file:
            file.seek(position)
            content = file.read(_MAX_READ)
        end = content.rfind(b"\n") + 1
        self._positions[path.name] = position + end
        parsed = (loads_object(line) for line in content[:end].split(b"\n") if line.strip())
        digits = path.stem.rpartition("rank")[2]
        rank = int(digits) if digits.isdigit() else 0
        order = self._orders.setdefault(path.name, EventOrder(rank))
        checked = (_checked(event, rank) for event in parsed if event is not None)
        return [(order.key(event), event) for event in checked]


def _key(keyed: tuple[EventKey, dict[str, Any]]) -> EventKey:
    return keyed[0]


def _checked(event: dict[str, Any], rank: int) -> dict[str, Any]:
    event = upgraded_event(_DEFAULTS | {"rank": rank} | event)
    for key in ("step", "attempt", "rank"):
        if not isinstance(event[key], int):
            event[key] = -1
    if not isinstance(event["time"], int | float):
        event["time"] = 0.0
    for key in _WORDS & event.keys():
        if event[key] is not None and not isinstance(event[key], str):
            event[key] = str(event[key])
    if not isinstance(event.get("values", {}), dict):
        del event["values"]
    return event


class EventLines:
    """Turns events into lines, with the wording of the console."""

    def __init__(self) -> None:
        self.lines: list[EventLine] = []
        self._event: Mapping[str, Any] = _DEFAULTS
        self._narrator = EventNarrator(self._emit, include_advice=False)  # incidents show it

    def add(self, event: Mapping[str, Any]) -> None:
        """Take in an event; one that another version wrote with other fields is left out."""
        self._event = event
        try:
            if event["kind"] == "checkpoint":
                self._checkpoint(event)
            elif event["kind"] == "note" and event.get("name") in ("attached", "closed"):
                self._emit(event["step"], "run", "attached" if event["name"] == "attached" else "closed", None)
            elif event["kind"] == "decision" and event.get("action") == Action.STOP:
                self._emit(event["step"], "action", f"stopped the run: {event['reason']}", None)
            else:
                self._narrator.on_event(event)
        except (KeyError, TypeError, AttributeError, ValueError):
            return

    def on_step(self, step: int, attempt: int, loss: float) -> None:
        """Lets a refusal be reported as having helped."""
        self._event = {"step": step, "attempt": attempt, "time": 0.0}
        self._narrator.on_step(step=step, attempt=attempt, loss=loss)

    def _checkpoint(self, event: Mapping[str, Any]) -> None:
        label = _LABELLED_CHECKPOINTS.get(event["name"])
        if label is not None:
            self._emit(event["step"], label, str(event["detail"]), None)

    def _emit(self, step: int, label: str, text: str, _style: str | None) -> None:
        time = float(self._event["time"])
        self.lines.append(EventLine(int(step), int(self._event["attempt"]), label, clean(text, _TEXT), time))
