"""Where a run's numbers go besides its own journal: TensorBoard and Weights & Biases, by the first rank only."""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from surefoot.records import Event, Note
from surefoot.train.figures import Figures
from surefoot.train.recipe.mistakes import RecipeError
from surefoot.train.recipe.schema import Log
from surefoot.train.story import Story

log = logging.getLogger("surefoot")
FOLDER = "tensorboard"
_NEEDED = {
    "tensorboard": ("log.tensorboard=true needs TensorBoard", "log.tensorboard=false"),
    "wandb": ("log.wandb needs Weights & Biases", "log.wandb=off"),
}


class Sink(Protocol):
    """A place that numbers and words are sent to; it may raise, and is left out from then on."""

    def scalars(self, step: int, values: Mapping[str, float], attempt: int | None = None) -> None: ...

    def text(self, step: int, words: str) -> None: ...

    def went_back(self, step: int) -> None:
        """The run is again as it was after this many updates: what came later is of a time that is gone."""
        ...

    def close(self, code: int = 0) -> None: ...


class TensorBoard:
    """Event files in the run's directory; after a resume or a rewind TensorBoard hides what is of a time gone by."""

    def __init__(self, folder: Path, *, resumed_at: int | None = None) -> None:
        self._folder = folder
        self._writer = self._open(resumed_at)

    def _open(self, step: int | None) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self._folder), purge_step=None if step is None else step + 1, flush_secs=10)

    def scalars(self, step: int, values: Mapping[str, float], attempt: int | None = None) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def text(self, step: int, words: str) -> None:
        self._writer.add_text("surefoot", words, step)

    def went_back(self, step: int) -> None:
        self._writer.close()
        self._writer = self._open(step)

    def close(self, code: int = 0) -> None:
        self._writer.close()


class Sinks:
    """All places at once. One that raises is left out, which is told once, and training goes on."""

    def __init__(self, sinks: Mapping[str, Sink]) -> None:
        self._sinks = dict(sinks)
        self._story = Story(lambda step, label, words, style: self.text(step, f"{label}: {words}"))

    def figures(self, figures: Figures) -> None:
        """The figures of one line of the console."""
        if not self._sinks:
            return
        self._story.row(step=figures.step, attempt=figures.attempt, loss=figures.loss)
        self.scalars(figures.step, named(figures), figures.attempt)

    def event(self, event: Event) -> None:
        """For `guard.on_event`: what the guard saw and did, as text, and steps that go back."""
        if isinstance(event, Note) and event.name == "rewound":
            self._all(lambda sink: sink.went_back(event.values["step"]))
        if self._sinks:
            self._story.event(event)

    def scalars(self, step: int, values: Mapping[str, float], attempt: int | None = None) -> None:
        self._all(lambda sink: sink.scalars(step, values, attempt))

    def text(self, step: int, words: str) -> None:
        self._all(lambda sink: sink.text(step, words))

    def close(self, code: int = 0) -> None:
        """All is written and sent; `code` is the number the run ends with. May be called again."""
        self._all(lambda sink: sink.close(code))
        self._sinks.clear()

    def _all(self, do: Callable[[Sink], None]) -> None:
        for name, sink in tuple(self._sinks.items()):
            try:
                do(sink)
            except Exception as error:
                del self._sinks[name]
                log.warning("surefoot: %s is left out from here on, training goes on: %r", name, error)


def named(figures: Figures) -> dict[str, float]:
    """Figures under the names that dashboards, and `surefoot diagnose`, know; a loss that is no number is one too."""
    told = {
        "train/loss": figures.loss,
        "train/learning_rate": figures.rate,
        "train/grad_norm": figures.norm,
        "speed/tokens_per_second": figures.tokens_per_s,
        "speed/samples_per_second": figures.samples_per_s,
        "speed/data_wait": figures.data_wait,
        "memory/bytes": figures.memory,
        "memory/peak_bytes": figures.memory_peak,
    }
    return {name: value for name, value in told.items() if name == "train/loss" or math.isfinite(value)}


def check(spec: Log) -> None:
    """Refuse a recipe that asks for what is not installed, before anything long starts; for all ranks."""
    asked = {"tensorboard": spec.tensorboard, "wandb": spec.wandb != "off"}
    for package, (needs, without) in _NEEDED.items():
        if asked[package] and importlib.util.find_spec(package) is None:
            raise RecipeError(
                f"{needs}, which is not installed. Install it: pip install 'surefoot[{package}]', or set {without}."
            )


def open_sinks(
    spec: Log, run_dir: Path, *, first: bool, name: str, config: Mapping[str, Any], resumed_at: int | None = None
) -> Sinks:
    """The places that a recipe names; none for ranks other than the first. `resumed_at` is the step to go on from."""
    check(spec)
    sinks: dict[str, Sink] = {}
    if first and spec.tensorboard:
        sinks["TensorBoard"] = TensorBoard(run_dir / FOLDER, resumed_at=resumed_at)
    if first and spec.wandb != "off":
        from surefoot.train.wandbsink import WeightsAndBiases

        sinks["Weights & Biases"] = WeightsAndBiases(
            run_dir, mode=spec.wandb, project=spec.project, name=name, config=config
        )
    return Sinks(sinks)
