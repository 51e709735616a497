"""What the loop tells: the guard, the console and the sinks, each once."""

from __future__ import annotations

from typing import Protocol

from surefoot.guard import Guard
from surefoot.train.console import Console
from surefoot.train.sinks import Sinks


class Listener(Protocol):
    """Whom the loop tells."""

    def updated(self, guard: Guard, tokens: int | None) -> None:
        """An update was made."""

    def evaluated(self, guard: Guard, step: int, loss: float | None) -> None:
        """Held-out data was looked at."""


class Telling:
    """Passes on what happened; it knows nothing of how a run is trained."""

    def __init__(self, console: Console, sinks: Sinks, total: int) -> None:
        self._console, self._sinks, self._total = console, sinks, total
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
