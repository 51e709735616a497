"""What a run says while it goes on: one live line on a terminal, plain lines elsewhere, and only by the first rank."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.live import Live
from rich.text import Text

from surefoot.records import Event, StepMetrics
from surefoot.train.figures import Figures, Figuring, fitting, in_words
from surefoot.train.recipe.schema import Recipe
from surefoot.train.spoken import Loud, Paper
from surefoot.train.story import Story

log = logging.getLogger("surefoot")
_PAUSE = 0.25
"""Seconds between two changes of the live line."""
_NOTED = 24
"""Letters of what the guard did last, in the live line; all of it stands above."""
_STYLES = {
    "proved": "dim",
    "exact_if": "dim",
    "stopped": "yellow",
    "careful": "yellow",
    "loosened": "yellow",
    "inexact": "yellow",
}
"""How checkpoint events look; any other is red."""


class Console:
    """Tells a person, or a log file, how a run goes.

    Between `begin` and `end` it also shows what surefoot logs. `follow` is handed `guard.latest` at every update, and
    `event` goes to `guard.on_event`; the rest is called when it happens. Ranks other than the first say only what went
    wrong with them. As a context manager it gives the terminal back however the run ends.
    """

    def __init__(
        self, recipe: Recipe, world_first: bool, total_steps: int, *, rank: int = 0, paper: Paper | None = None
    ) -> None:
        self._name, self._every, self._total = recipe.name, recipe.log.every, total_steps
        self._first = world_first
        self._paper = paper or Paper(None if world_first else sys.stderr)
        self._story = Story(self._beat)
        self._figuring = Figuring(recipe.log.every)
        self._loud = Loud(self._paper, first=world_first, rank=rank)
        self._live: Live | None = None
        self._due = 0.0
        self._note = ""
        self._shown = -1

    def begin(self, facts: Mapping[str, Any]) -> None:
        """A short header: what is trained, on what, with what, where to."""
        log.addHandler(self._loud)
        if not self._first:
            return
        self._paper.say(self._name, "bold")
        self._list(facts)
        if self._paper.is_terminal:
            self._live = Live(Text("the first update is on its way"), console=self._paper, refresh_per_second=4)
            self._live.start()

    def follow(self, row: StepMetrics | None) -> Figures | None:
        """Take in the latest row; its figures come back when it is time for a line, and are shown."""
        if not self._first or row is None or not self._figuring.take(row):
            return None
        self._story.row(step=row.step, attempt=row.attempt, loss=row.loss)
        done = row.step + 1
        due = row.applied and (done % self._every == 0 or done == self._total or self._shown < 0)
        if due:
            self._shown = done
            figures = self._figuring.now()
            self.row(figures)
            return figures
        if self._live is not None and time.monotonic() >= self._due:
            self.row(self._figuring.now())
        return None

    def row(self, figures: Figures) -> None:
        """Show these figures now: in the live line where there is one, else in a line of their own."""
        if not self._first:
            return
        self._due = time.monotonic() + _PAUSE
        parts = in_words(figures, self._total)
        if self._live is None:
            self._paper.print("  ".join(parts.values()))
        else:
            self._live.update(Text(fitting(parts, self._paper.width, self._note), no_wrap=True, overflow="ellipsis"))

    def event(self, event: Event) -> None:
        """What the guard saw, why, what it did and whether it helped; and what became of checkpoints."""
        if not self._first:
            return
        told = event.as_json()
        if told.get("name") == "rewound":
            self._figuring.went_back(event.attempt)
        if event.kind != "checkpoint":
            self._story.event(told)
        elif told["name"] == "saved":
            self.saved(told["values"].get("step", event.step))
        elif told["name"] != "resumed":  # the header says it
            self._beat(event.step, told["name"], told["detail"], _STYLES.get(told["name"], "red"))

    def evaluated(self, step: int, loss: float) -> None:
        self._beat(step, "held out", f"loss {loss:.4f}", None)

    def saved(self, step: int) -> None:
        self._beat(step, "saved", "the run can go on from here", "dim")

    def say(self, words: str) -> None:
        """Anything else, in a line of its own."""
        if self._first:
            self._paper.print(words)

    def end(self, summary: Mapping[str, Any]) -> None:
        """The live line stays as it was last; below it what came of the run. May be called again, to no effect."""
        log.removeHandler(self._loud)
        live, self._live = self._live, None
        if live is not None:
            live.stop()
        if self._first and summary:
            self._list(summary)

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.end({})

    def _beat(self, step: int, label: str, words: str, style: str | None) -> None:
        if not self._first:
            return
        if label in ("did", "would", "failed"):
            self._note = f"{self._story.acts.get(step) or words[:_NOTED]} at {step}"
        self._paper.beat(step, label, words, style)

    def _list(self, facts: Mapping[str, Any]) -> None:
        width = max((len(name) for name in facts), default=0)
        for name, value in facts.items():
            self._paper.print(f"  {name:{width}}  {value}")
