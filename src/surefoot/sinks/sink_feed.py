"""Feeds sinks from what the journal receives, in a thread of its own: nothing of it runs in the training's thread."""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from surefoot.journal.strict_json import loads_object
from surefoot.journal.writer import Item, LayerLayout
from surefoot.records import LAYER_STATS, StepMetrics
from surefoot.sinks.narrator import EventNarrator
from surefoot.sinks.progress import ProgressTracker
from surefoot.sinks.sink import MetricSink, scalar_names
from surefoot.sinks.sink_choice import SinkChoice

log = logging.getLogger("surefoot")
_QUEUE = 4096
"""Rows and events that wait for a slow sink; further ones are dropped and counted."""
_CLOSE_SECONDS = 30.0
"""How long the end of a run waits for its sinks."""
_WINDOW = 20
"""Rows over which speeds are averaged, unless rows between two writes are more."""
_NORM = LAYER_STATS.index("norm")

Report = Callable[[str], None]


class SinkFeed:
    """A companion of the journal that feeds one sink. An error in the sink ends it, with one report."""

    def __init__(self, choice: SinkChoice, sink: MetricSink, report: Report) -> None:
        self._choice, self._sink, self._report = choice, sink, report
        self._queue: queue.Queue[Item | None] = queue.Queue(_QUEUE)
        self._lost = 0
        self._failed = False
        self._names: tuple[str, ...] = ()
        self._tracker = ProgressTracker(max(_WINDOW, choice.every))
        self._narrator = EventNarrator(self._write_text)
        self._code = 0
        self._thread = threading.Thread(target=self._serve, name="surefoot-sink", daemon=True)
        self._thread.start()

    # -- in the journal's thread

    def received(self, items: Sequence[Item]) -> None:
        for item in items:
            if self._failed or not isinstance(item, StepItem):
                continue
            try:
                self._queue.put_nowait(item)
            except queue.Full:
                self._lost += 1

    def journal_failed(self, reason: str) -> None:
        """Nothing to do: what the journal received until then is written."""

    def close(self) -> None:
        """Write what waits and close the sink; one that hangs is left behind."""
        try:
            self._queue.put(None, timeout=_CLOSE_SECONDS)
        except queue.Full:
            log.warning("surefoot: %s does not answer; what it had not written yet is lost", self._choice.title)
            return
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            log.warning("surefoot: %s has not finished within %g s", self._choice.title, _CLOSE_SECONDS)
        if self._lost:
            log.warning("surefoot: %s was too slow: %d rows or events were left out", self._choice.title, self._lost)

    # -- in the sink's thread

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            if not self._failed:
                self._contained(lambda item=item: self._write(item))
        if not self._failed:
            self._contained(lambda: self._sink.close(self._code))

    def _contained(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self._failed = True
            self._report(f"{self._choice.title} failed and is not used any more; training goes on: {error!r}")
            try:
                self._sink.close(1)
            except Exception as second:
                log.debug("surefoot: %s cannot be closed either: %r", self._choice.title, second)

    def _write(self, item: Item) -> None:
        if isinstance(item, bytes):
            event = loads_object(item)
            if event is not None:
                self._write_event(event)
        elif isinstance(item, LayerLayout):
            self._names = item.names
        elif isinstance(item, tuple):
            self._write_row(*item)

    def _write_row(self, row: StepMetrics, layers: np.ndarray | None) -> None:
        if row.optimizer or not self._tracker.add(row):
            return
        self._narrator.on_step(step=row.step, attempt=row.attempt, loss=row.loss)
        metrics = self._tracker.current()
        if not math.isnan(row.eval_loss):
            self._sink.scalars(metrics.step, {"eval/loss": row.eval_loss})
        if row.applied and metrics.step % self._choice.every:
            return
        values = scalar_names(metrics) | _machine(row)
        if self._choice.layers and layers is not None and len(layers) == len(self._names):
            values |= {f"grad_norm/{name}": float(layers[k, _NORM]) for k, name in enumerate(self._names)}
        self._sink.scalars(metrics.step, values, metrics.attempt)

    def _write_event(self, event: Mapping[str, Any]) -> None:
        name, values = event.get("name"), event.get("values")
        step = values.get("step") if isinstance(values, dict) else None
        if name in ("rewound", "resumed") and isinstance(step, int):
            self._sink.rewound(step)
        if name == "exception":
            self._code = 1
        self._narrator.on_event(event)

    def _write_text(self, step: int, label: str, text: str, style: str | None) -> None:
        self._sink.text(step, f"{label}: {text}")


StepItem = tuple | bytes | LayerLayout
"""What of a journal is for a sink; markers are not."""


def _machine(row: StepMetrics) -> dict[str, float]:
    values = {"machine/utilisation": row.utilisation, "machine/memory_bandwidth": row.memory_bandwidth}
    return {name: value for name, value in values.items() if not math.isnan(value)}
