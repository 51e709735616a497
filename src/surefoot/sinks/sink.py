"""The sinks a run writes to besides its journal, opened and fed together."""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from surefoot.records import Event, Note
from surefoot.sinks.narrator import EventNarrator
from surefoot.sinks.progress import ProgressMetrics

log = logging.getLogger("surefoot")
TENSORBOARD_DIR = "tensorboard"
_REQUIREMENTS = {
    "tensorboard": ("log.tensorboard=true needs TensorBoard", "log.tensorboard=false"),
    "wandb": ("log.wandb needs Weights & Biases", "log.wandb=off"),
}


class SinkError(ValueError):
    """A sink cannot be opened as configured; the message says what to change."""


class LogOptions(Protocol):
    """Which sinks to open; the `log` section of a recipe."""

    @property
    def tensorboard(self) -> bool: ...
    @property
    def wandb(self) -> str: ...
    @property
    def project(self) -> str: ...


class MetricSink(Protocol):
    """Receives scalars and text. A sink that raises is dropped for the rest of the run."""

    def scalars(self, step: int, values: Mapping[str, float], attempt: int | None = None) -> None: ...

    def text(self, step: int, message: str) -> None: ...

    def rewound(self, step: int) -> None:
        """The run is back at `step` updates: everything later was undone."""
        ...

    def close(self, code: int = 0) -> None: ...


class Sinks:
    """All sinks of a run. One that raises is dropped with one warning; training goes on."""

    def __init__(self, sinks: Mapping[str, MetricSink]) -> None:
        self._sinks = dict(sinks)
        self._narrator = EventNarrator(lambda step, label, text, style: self.text(step, f"{label}: {text}"))

    def metrics(self, metrics: ProgressMetrics) -> None:
        """The metrics of one progress line."""
        if not self._sinks:
            return
        self._narrator.on_step(step=metrics.step, attempt=metrics.attempt, loss=metrics.loss)
        self.scalars(metrics.step, scalar_names(metrics), metrics.attempt)

    def on_event(self, event: Event) -> None:
        """For `guard.on_event`: events become text, and a rewind moves the step back."""
        if isinstance(event, Note) and event.name == "rewound":
            self._for_each(lambda sink: sink.rewound(event.values["step"]))
        if self._sinks:
            self._narrator.on_event(event)

    def scalars(self, step: int, values: Mapping[str, float], attempt: int | None = None) -> None:
        self._for_each(lambda sink: sink.scalars(step, values, attempt))

    def text(self, step: int, message: str) -> None:
        self._for_each(lambda sink: sink.text(step, message))

    def close(self, code: int = 0) -> None:
        """Flush and close all sinks; `code` is the run's exit code. May be called again."""
        self._for_each(lambda sink: sink.close(code))
        self._sinks.clear()

    def _for_each(self, call: Callable[[MetricSink], None]) -> None:
        for name, sink in tuple(self._sinks.items()):
            try:
                call(sink)
            except Exception as error:
                del self._sinks[name]
                log.warning("surefoot: %s failed and is not used any more; training goes on: %r", name, error)


def scalar_names(metrics: ProgressMetrics) -> dict[str, float]:
    """Metrics under the names dashboards and `surefoot diagnose` know; unknown ones are left out, except the loss."""
    scalars = {
        "train/loss": metrics.loss,
        "train/learning_rate": metrics.lr,
        "train/grad_norm": metrics.grad_norm,
        "speed/tokens_per_second": metrics.tokens_per_s,
        "speed/samples_per_second": metrics.samples_per_s,
        "speed/data_wait": metrics.data_wait,
        "memory/bytes": metrics.memory,
        "memory/peak_bytes": metrics.memory_peak,
    }
    return {name: value for name, value in scalars.items() if name == "train/loss" or math.isfinite(value)}


def check_installed(options: LogOptions) -> None:
    """Refuse sinks whose package is not installed, on every rank, before anything slow starts."""
    wanted = {"tensorboard": options.tensorboard, "wandb": options.wandb != "off"}
    for package, (requirement, without) in _REQUIREMENTS.items():
        if wanted[package] and importlib.util.find_spec(package) is None:
            raise SinkError(
                f"{requirement}, which is not installed: pip install 'surefoot[{package}]', or set {without}."
            )


def open_sinks(
    options: LogOptions,
    run_dir: Path,
    *,
    is_first: bool,
    name: str,
    config: Mapping[str, Any],
    resumed_at: int | None = None,
) -> Sinks:
    """Open the configured sinks on the first rank; `resumed_at` is the step a resumed run starts from."""
    check_installed(options)
    sinks: dict[str, MetricSink] = {}
    if is_first and options.tensorboard:
        from surefoot.sinks.tensorboard import TensorBoardSink

        sinks["TensorBoard"] = TensorBoardSink(run_dir / TENSORBOARD_DIR, resumed_at=resumed_at)
    if is_first and options.wandb != "off":
        from surefoot.sinks.wandb import WandbSink

        sinks["Weights & Biases"] = WandbSink(
            run_dir, mode=options.wandb, project=options.project, name=name, config=config
        )
    return Sinks(sinks)
