"""Passes what happens in the training loop to the guard, the console and the sinks."""

from __future__ import annotations

from typing import Protocol

from surefoot.data.corpus import TrainingData
from surefoot.guard.attach import Guard
from surefoot.sinks.console import RunConsole
from surefoot.sinks.sink import Sinks

_NAMED_SAMPLES = 5
"""Unreadable samples that are reported one by one; the rest are only counted."""


class LoopListener(Protocol):
    """What the training loop calls."""

    def updated(self, guard: Guard, tokens: int | None) -> None:
        """After every update."""

    def evaluated(self, guard: Guard, step: int, loss: float | None) -> None:
        """After every evaluation; `loss` is None without held-out data."""


class Reporter:
    """A `LoopListener` that reports progress to the guard, the console and the sinks."""

    def __init__(self, console: RunConsole, sinks: Sinks, total: int, *, data: TrainingData | None = None) -> None:
        self._console, self._sinks, self._total, self._data = console, sinks, total, data
        self._reported_samples = 0
        self.evaluations: list[tuple[int, float]] = []

    def subscribe(self, guard: Guard) -> None:
        """Receive the guard's events."""
        guard.on_event(self._console.on_event)
        guard.on_event(self._sinks.on_event)

    def updated(self, guard: Guard, tokens: int | None) -> None:
        if tokens is None:
            guard.report(total_steps=self._total)
        else:
            guard.report(total_steps=self._total, tokens=tokens)
        self.report_latest(guard)
        self._report_unreadable()

    def report_latest(self, guard: Guard) -> None:
        """Report the latest row; call it once more after the guard is closed, which reads the last rows."""
        metrics = self._console.update(guard.latest)
        if metrics is not None:
            self._sinks.metrics(metrics)

    def evaluated(self, guard: Guard, step: int, loss: float | None) -> None:
        if loss is None:
            return
        self.evaluations.append((step, loss))
        guard.report(eval_loss=loss)
        self._console.evaluated(step, loss)
        self._sinks.scalars(step, {"eval/loss": loss})

    def _report_unreadable(self) -> None:
        """Report samples that turned out unreadable since the last call; the summary has their total."""
        bad = [] if self._data is None else self._data.unreadable
        for sample in bad[self._reported_samples : _NAMED_SAMPLES]:
            self._console.print(f"  note: skipped an unreadable sample: {sample}")
        self._reported_samples = len(bad)
