"""What others write to have a run's numbers and events: a class with three methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class RunSink(Protocol):
    """Give an instance to `surefoot.attach(..., sinks=[...])`; its methods are called in a thread of their own, one
    after the other, never in the training's. After a rewind `step` goes back. If one of them raises, the sink is
    closed and used no more; training goes on."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers at a step, such as {"train/loss": 2.1, "train/grad_norm": 0.7, "speed/samples_per_second": 512.0}."""
        ...

    def text(self, step: int, message: str) -> None:
        """What was found, why, and what was done, one line each."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


class UserSink:
    """Fits a `RunSink` among surefoot's own sinks."""

    def __init__(self, sink: RunSink) -> None:
        self._sink = sink

    def scalars(self, step: int, values: Mapping[str, float], attempt: int | None = None) -> None:
        self._sink.scalars(step, values)

    def text(self, step: int, message: str) -> None:
        self._sink.text(step, message)

    def rewound(self, step: int) -> None:
        """The next steps show it, and a text says so."""

    def close(self, code: int = 0) -> None:
        self._sink.close()
