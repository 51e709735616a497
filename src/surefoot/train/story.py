"""What surefoot sees, thinks and does in a run, told while it goes on: one line a beat."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from surefoot.records import Cause, Event

Say = Callable[[int, str, str, str | None], None]
"""Says one beat: the step, a label (saw, why, did, so, failed), the words, and a style."""
MACHINE = frozenset({"slow_steps", "idle_device", "memory_growth"})
"""Detectors that look at the machine and not at the run."""
SEEN_AFTER = 5
"""Updates that have to land before it is said that refusing helped."""


class Story:
    """Takes events as they come, and rows to see what came of them.

    `counted` is the number that beats are told by: `step`, the updates that landed, or `attempt`, which counts as a
    loop does that knows of no refusals. Without `machine` nothing is said of a slow or crowded machine.
    """

    def __init__(self, say: Say, *, counted: str = "step", machine: bool = True) -> None:
        self.acts: dict[int, str] = {}
        """What was done, and when."""
        self._say = say
        self._counted = counted
        self._left_out = frozenset[str]() if machine else MACHINE
        self._words: set[str] = set()
        """What was said since trouble began; nothing is said twice."""
        self._named = -1
        self._refused: list[int] = []
        """The updates refused in a row, up to now."""
        self._decided: Mapping[str, Any] = {}
        self._tellers = {
            "finding": self._finding,
            "diagnosis": self._diagnosis,
            "decision": self._decision,
            "note": self._note,
            "outcome": self._outcome,
        }

    def event(self, event: Event | Mapping[str, Any]) -> None:
        """Tell one event, if there is anything in it for a reader."""
        told = event.as_json() if isinstance(event, Event) else event
        tell = self._tellers.get(told["kind"])
        if tell is not None:
            tell(told)

    def row(self, *, step: int, attempt: int, loss: float) -> None:
        """Look at a later update: refusals in a row are summed up, once it is seen what came after."""
        if not self._refused or attempt < self._refused[-1] + SEEN_AFTER:
            return
        many = f"{len(self._refused)} updates were refused in a row" if len(self._refused) > 1 else "it helped"
        at = step if self._counted == "step" else attempt
        self._say(at, "so", f"{many}: those after land again, the loss is {loss:.4g}", "green")
        self._refused = []
        self._words.clear()

    def _once(self, event: Mapping[str, Any], label: str, words: str, style: str) -> None:
        if words not in self._words:
            self._words.add(words)
            self._say(event[self._counted], label, words, style)

    def _in_a_row(self, event: Mapping[str, Any]) -> bool:
        return bool(self._refused) and event["attempt"] == self._refused[-1] + 1

    def _finding(self, event: Mapping[str, Any]) -> None:
        known = self._in_a_row(event) and event["detector"] in ("nonfinite", "norm_outlier")
        if event["detector"] not in self._left_out and not known:
            self._once(event, "saw", event["detail"], "yellow")

    def _diagnosis(self, event: Mapping[str, Any]) -> None:
        """The surest cause; those after it stand in the journal."""
        if event["attempt"] != self._named and not self._left_out & set(event["evidence"].get("findings", ())):
            words = event["detail"].replace(". ", ": ", 1)
            sure = "" if event["cause"] == Cause.UNKNOWN else f" ({event['confidence']:.0%} sure)"
            self._once(event, "why", f"{words}{sure}", "cyan")
        self._named = event["attempt"]

    def _decision(self, event: Mapping[str, Any]) -> None:
        action, at = event["action"], event[self._counted]
        if not event.get("applied", True):
            self._once(event, "would", event.get("remedy") or f"{action}: {event['reason']}", "bold")
        elif action == "refuse":
            in_a_row = self._in_a_row(event)
            self._refused = [*self._refused, event["attempt"]] if in_a_row else [event["attempt"]]
            if not in_a_row:
                self.acts[at] = "update refused"
                words = f"refused the update: weights and optimizer are as before{self._why(event)}"
                self._say(at, "did", words, "bold")
        elif action == "rewind":
            self._decided = event
        elif action != "stop":  # whoever runs the loop tells that one
            self._say(at, "did", event["reason"], "bold")

    def _why(self, decision: Mapping[str, Any]) -> str:
        """The reason for a decision, without what was said a line or two above."""
        new = [part for part in decision.get("reason", "").split(", and ") if part and part not in self._words]
        return f", because {' and '.join(new)}" if new else ""

    def _note(self, event: Mapping[str, Any]) -> None:
        at = event[self._counted]
        if event["name"] == "rewound":
            back = event["values"][self._counted]
            at = self._decided.get("step", at) if self._counted == "step" else at  # the note's step is the one now
            self.acts[at] = f"back to step {back}"
            rung = self._decided.get("remedy", "to be safe")
            self._say(at, "did", f"went back to step {back}, {rung}{self._why(self._decided)}", "bold")
        elif event["name"] in ("failed", "degraded"):
            self._say(at, "failed", event["detail"], "red")

    def _outcome(self, event: Mapping[str, Any]) -> None:
        self._say(event[self._counted], "so", event["detail"], "green" if event["helped"] else "red")
        self._words.clear()
