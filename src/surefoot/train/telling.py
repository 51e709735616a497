"""What the loop tells: the guard, the console and the sinks, each once."""

from __future__ import annotations

from typing import Protocol

from surefoot.data.corpus import TrainingData
from surefoot.guard.attach import Guard
from surefoot.train.console import Console
from surefoot.train.sinks import Sinks

_NAMED = 5
"""Samples that cannot be read that are told one by one."""


class Listener(Protocol):
    """Whom the loop tells."""

    def updated(self, guard: Guard, tokens: int | None) -> None:
        """An update was made."""

    def evaluated(self, guard: Guard, step: int, loss: float | None) -> None:
        """Held-out data was looked at."""


class Telling:
    """Passes on what happened; it knows nothing of how a run is trained."""

    def __init__(self, console: Console, sinks: Sinks, total: int, *, data: TrainingData | None = None) -> None:
        self._console, self._sinks, self._total, self._data = console, sinks, total, data
        self._passed_over = 0
        self.evaluations: list[tuple[int, float]] = []

    def listen(self, guard: Guard) -> None:
        """Hear what the guard does."""
        guard.on_event(self._console.event)
        guard.on_event(self._sinks.event)

    def updated(self, guard: Guard, tokens: int | None) -> None:
        """An update was made."""
        if tokens is None:
            guard.report(total_steps=self._total)
        else:
            guard.report(total_steps=self._total, tokens=tokens)
        self.follow(guard)
        self._name_unreadable()

    def follow(self, guard: Guard) -> None:
        """Pass on the numbers that were read last; once more when the guard is closed, as it reads the rest then."""
        figures = self._console.follow(guard.latest)
        if figures is not None:
            self._sinks.figures(figures)

    def evaluated(self, guard: Guard, step: int, loss: float | None) -> None:
        """Held-out data was looked at."""
        if loss is None:
            return
        self.evaluations.append((step, loss))
        guard.report(eval_loss=loss)
        self._console.evaluated(step, loss)
        self._sinks.scalars(step, {"eval/loss": loss})

    def _name_unreadable(self) -> None:
        """Those that turned up since the last time; how many there were in all is told at the end."""
        bad = [] if self._data is None else self._data.unreadable
        for one in bad[self._passed_over : _NAMED]:
            self._console.say(f"  note: a sample is passed over, as it cannot be read: {one}")
        self._passed_over = len(bad)
