"""Prints progress: one live line on a terminal, plain lines elsewhere; only the first rank prints."""

from __future__ import annotations

import logging
import os
import sys
import textwrap
import time
from collections.abc import Mapping
from typing import IO, Any

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from surefoot.records import EVENT_MARK, Event, StepMetrics
from surefoot.sinks.narrator import EventNarrator
from surefoot.sinks.progress import ProgressMetrics, ProgressTracker, fit_to_width, format_metrics

log = logging.getLogger("surefoot")
_REFRESH_SECONDS = 0.25
"""Between two changes of the live line."""
_NOTE_LENGTH = 24
"""Characters of the last action in the live line; the full text is printed above it."""
_STYLES = {
    "proved": "dim",
    "exact_if": "dim",
    "stopped": "yellow",
    "careful": "yellow",
    "loosened": "yellow",
    "inexact": "yellow",
}
"""Styles of checkpoint events by name; all others are red."""


class RunConsole:
    """Prints a run's header, progress, events and summary.

    Between `start` and `finish` it also prints what surefoot logs. Pass `guard.latest` to `update` at every step, and
    `on_event` to `guard.on_event`. Ranks other than the first print only their own errors. As a context manager it
    restores the terminal however the run ends.
    """

    def __init__(
        self,
        name: str,
        *,
        total_steps: int,
        every: int,
        is_first: bool = True,
        rank: int = 0,
        output: PlainConsole | None = None,
    ) -> None:
        self._name, self._every, self._total = name, every, total_steps
        self._is_first = is_first
        self._output = output or PlainConsole(None if is_first else sys.stderr)
        self._narrator = EventNarrator(self._print_event)
        self._progress = ProgressTracker(every)
        self._log_handler = ConsoleLogHandler(self._output, is_first=is_first, rank=rank)
        self._live: Live | None = None
        self._next_refresh = 0.0
        self._note = ""
        self._last_step = -1

    def start(self, facts: Mapping[str, Any]) -> None:
        """Print a header: the run's name, then `facts` one per line."""
        log.addHandler(self._log_handler)
        if not self._is_first:
            return
        self._output.print_styled(self._name, "bold")
        self._print_table(facts)
        if self._output.is_terminal:
            self._live = Live(Text("waiting for the first update"), console=self._output, refresh_per_second=4)
            self._live.start()

    def update(self, row: StepMetrics | None) -> ProgressMetrics | None:
        """Take the latest row; when a line is due, print it and return its metrics."""
        if not self._is_first or row is None or not self._progress.add(row):
            return None
        self._narrator.on_step(step=row.step, attempt=row.attempt, loss=row.loss)
        done = row.step + 1
        due = row.applied and (done % self._every == 0 or done == self._total or self._last_step < 0)
        if due:
            self._last_step = done
            metrics = self._progress.current()
            self.show(metrics)
            return metrics
        if self._live is not None and time.monotonic() >= self._next_refresh:
            self.show(self._progress.current())
        return None

    def show(self, metrics: ProgressMetrics) -> None:
        """Show these metrics now: in the live line if there is one, else as a line of its own."""
        if not self._is_first:
            return
        self._next_refresh = time.monotonic() + _REFRESH_SECONDS
        parts = format_metrics(metrics, self._total)
        if self._live is None:
            self._output.print("  ".join(parts.values()))
        else:
            line = fit_to_width(parts, self._output.width, self._note)
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"))

    def on_event(self, event: Event) -> None:
        """Print what the guard found, decided and did, and checkpoint events."""
        if not self._is_first:
            return
        fields = event.as_json()
        if fields.get("name") == "rewound":
            self._progress.rewound(event.attempt)
        if event.kind != "checkpoint":
            self._narrator.on_event(fields)
        elif fields["name"] == "saved":
            self.saved(fields["values"].get("step", event.step))
        elif fields["name"] != "resumed":  # the header says so
            self._print_event(event.step, fields["name"], fields["detail"], _STYLES.get(fields["name"], "red"))

    def evaluated(self, step: int, loss: float) -> None:
        self._print_event(step, "eval", f"loss {loss:.4f}", None)

    def saved(self, step: int) -> None:
        self._print_event(step, "saved", "checkpoint written", "dim")

    def print(self, message: str) -> None:
        if self._is_first:
            self._output.print(message)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Stop the live line, leave it as it is, and print the summary below; may be called again."""
        log.removeHandler(self._log_handler)
        live, self._live = self._live, None
        if live is not None:
            live.stop()
        if self._is_first and summary:
            self._print_table(summary)

    def __enter__(self) -> RunConsole:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish({})

    def _print_event(self, step: int, label: str, text: str, style: str | None) -> None:
        if not self._is_first:
            return
        if label in ("action", "would", "failed"):
            self._note = f"{self._narrator.actions.get(step) or text[:_NOTE_LENGTH]} at {step}"
        self._output.print_event(step, label, text, style)

    def _print_table(self, rows: Mapping[str, Any]) -> None:
        width = max((len(name) for name in rows), default=0)
        for name, value in rows.items():
            self._output.print(f"  {name:{width}}  {value}")


class PlainConsole(RichConsole):
    """A rich console without markup; when the reader of a pipe leaves, the run goes on without output."""

    def __init__(self, file: IO[str] | None = None) -> None:
        super().__init__(file=file, highlight=False, markup=False, emoji=False, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        if self.file is sys.stdout:  # else Python fails to flush it at exit
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, sys.stdout.fileno())
            os.close(devnull)

    def print_styled(self, text: str, style: str | None = None) -> None:
        """Style this text only; `print(style=...)` would also style a live line below it."""
        self.print(Text(text, style or ""))

    def print_event(self, step: int, label: str, text: str, style: str | None = None) -> None:
        """One event; on a terminal long text is wrapped and indented."""
        prefix = f"step {step:<7} {label:9} "
        if self.is_terminal:
            text = textwrap.fill(text, max(40, self.width - len(prefix) - 1), break_long_words=False)
        self.print_styled(prefix + text.replace("\n", "\n" + " " * len(prefix)), style)


class ConsoleLogHandler(logging.Handler):
    """Prints surefoot's log records to the console, except those that are reported as events too."""

    def __init__(self, output: PlainConsole, *, is_first: bool, rank: int = 0) -> None:
        super().__init__(logging.WARNING if is_first else logging.ERROR)
        self._output = output
        self._prefix = "" if is_first else f"rank {rank}: "
        self.addFilter(lambda record: not getattr(record, EVENT_MARK, False))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = self.format(record).removeprefix("surefoot: ")
            self._output.print(f"{record.levelname.lower()}: {self._prefix}{message}")
        except Exception:
            self.handleError(record)
