"""Turns guard events into short lines for people: finding, cause, action, outcome."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from surefoot.cases.similarity import similar_sentence
from surefoot.journal.incident_folders import INCIDENTS_DIR
from surefoot.judge.diagnosis import MACHINE_DETECTORS
from surefoot.records import Action, Cause, Event, FindingKind
from surefoot.story.action_sentences import (
    decision_sentence,
    refusal_outcome,
    refusal_sentence,
    rewound_sentence,
    trial_constrained_sentence,
)
from surefoot.story.row_facts import APPLIED_TO_CONFIRM

Emit = Callable[[int, str, str, str | None], None]
"""Receives one line: step, label (finding, cause, to do, case, action, trial, outcome, would, failed, more), text,
style."""
REFUSALS = (FindingKind.NONFINITE, FindingKind.NORM_OUTLIER)
"""What is found in updates that were refused."""


class EventNarrator:
    """Formats events as they arrive, and looks at later rows to report whether a refusal helped.

    `count_by` selects the number that lines carry: `step` (applied updates), or `attempt`, which counts like a loop
    that knows of no refusals. `include_system=False` leaves out findings about a slow or full machine, and
    `include_advice=False` what to change and where to read more.
    """

    def __init__(
        self, emit: Emit, *, count_by: str = "step", include_system: bool = True, include_advice: bool = True
    ) -> None:
        self.actions: dict[int, str] = {}
        """Short text of each action, by the step it was reported at."""
        self._emit = emit
        self._count_by = count_by
        self._ignored = frozenset[str]() if include_system else frozenset[str](MACHINE_DETECTORS)
        self._include_advice = include_advice
        self._emitted: set[str] = set()
        """Lines emitted since the incident began; none is repeated."""
        self._diagnosed_attempt = -1
        self._refused: list[int] = []
        """Attempts of the current run of consecutive refusals."""
        self._rewind: Mapping[str, Any] = {}
        """The last rewind decision: its note follows once it is done."""
        self._handlers = {
            "finding": self._finding,
            "diagnosis": self._diagnosis,
            "decision": self._decision,
            "note": self._note,
            "trial": self._trial,
            "outcome": self._outcome,
        }

    def on_event(self, event: Event | Mapping[str, Any]) -> None:
        """Report an event, unless it holds nothing for a reader."""
        fields = event.as_json() if isinstance(event, Event) else event
        handler = self._handlers.get(fields["kind"])
        if handler is not None:
            handler(fields)

    def on_step(self, *, step: int, attempt: int, loss: float) -> None:
        """Sum up consecutive refusals once `APPLIED_TO_CONFIRM` attempts have followed."""
        if not self._refused or attempt < self._refused[-1] + APPLIED_TO_CONFIRM:
            return
        number = step if self._count_by == "step" else attempt
        self._emit(number, "outcome", refusal_outcome(len(self._refused), loss), "green")
        self._refused = []
        self._emitted.clear()

    def _emit_once(self, event: Mapping[str, Any], label: str, text: str, style: str) -> None:
        if text not in self._emitted:
            self._emitted.add(text)
            self._emit(event[self._count_by], label, text, style)

    def _is_consecutive(self, event: Mapping[str, Any]) -> bool:
        return bool(self._refused) and event["attempt"] == self._refused[-1] + 1

    def _finding(self, event: Mapping[str, Any]) -> None:
        known = self._is_consecutive(event) and event["detector"] in REFUSALS
        if event["detector"] not in self._ignored and not known:
            self._emit_once(event, "finding", event["detail"], "yellow")

    def _diagnosis(self, event: Mapping[str, Any]) -> None:
        """Only the likeliest cause, which comes first, and one that a trial has shown; the journal has all."""
        is_first = event["attempt"] != self._diagnosed_attempt
        by_trial = "trial" in event["evidence"]
        if (is_first or by_trial) and not self._ignored & set(event["evidence"].get("findings", ())):
            text = event["detail"].replace(". ", ": ", 1)
            confidence = "" if event["cause"] == Cause.UNKNOWN else f" ({event['confidence']:.0%} sure)"
            self._emit_once(event, "cause", f"{text}{confidence}", "cyan")
            if self._include_advice and event.get("advice"):
                self._emit_once(event, "to do", event["advice"][0], "cyan")
            for case in event.get("similar_cases") or ():
                self._emit_once(event, "case", similar_sentence(case), "cyan")
        self._diagnosed_attempt = event["attempt"]

    def _decision(self, event: Mapping[str, Any]) -> None:
        action, number = event["action"], event[self._count_by]
        if not event.get("applied", True):
            self._emit_once(event, "would", event.get("remedy") or f"{action}: {event['reason']}", "bold")
        elif action == Action.REFUSE:
            consecutive = self._is_consecutive(event)
            self._refused = [*self._refused, event["attempt"]] if consecutive else [event["attempt"]]
            if not consecutive:
                self.actions[number] = "update refused"
                text = f"{refusal_sentence(1)}{self._because(event)}"
                self._emit(number, "action", text, "bold")
        elif action == Action.REWIND:
            self._rewind = event
        elif action != Action.STOP:  # the caller of the loop reports a stop
            self._emit(number, "action", f"{decision_sentence(event)}{self._because(event)}", "bold")

    def _because(self, decision: Mapping[str, Any]) -> str:
        """The decision's reason, without the parts that were just emitted."""
        new = [part for part in decision.get("reason", "").split(", and ") if part and part not in self._emitted]
        return f", because {' and '.join(new)}" if new else ""

    def _note(self, event: Mapping[str, Any]) -> None:
        number = event[self._count_by]
        if event["name"] == "rewound":
            target = event["values"][self._count_by]
            if self._count_by == "step":  # the note carries the step after the rewind
                number = self._rewind.get("step", number)
            if "kept" in event["values"]:  # a trial has shown how to go on without losing updates
                self.actions[number] = f"retrained {event['values']['kept']} updates"
            else:
                self.actions[number] = f"rewound to step {target}"
            text = rewound_sentence(self._rewind, {**event, "values": {**event["values"], "step": target}})
            self._emit(number, "action", f"{text}{self._because(self._rewind)}", "bold")
        elif event["name"] == "incident" and self._include_advice and event["values"].get("folder"):
            self._emit(number, "more", f"incident bundle {INCIDENTS_DIR}/{event['values']['folder']}", "dim")
        elif event["name"] == "banned":
            self._emit(number, "action", event["detail"], "bold")
        elif event["name"] in ("failed", "degraded"):
            self._emit(number, "failed", event["detail"], "red")

    def _trial(self, event: Mapping[str, Any]) -> None:
        if event["detail"]:
            self._emit_once(event, "trial", event["detail"], "cyan")
        carried_out = event.get("values", {}).get("carried_out")
        pending = self._rewind.get("attempt") == event["attempt"]
        if pending and carried_out is not None and carried_out["action"] == Action.CONSTRAIN:
            self._emit(event[self._count_by], "action", trial_constrained_sentence(event, carried_out), "bold")

    def _outcome(self, event: Mapping[str, Any]) -> None:
        self._emit(event[self._count_by], "outcome", event["detail"], "green" if event["helped"] else "red")
        self._emitted.clear()
