"""Writes a run's metrics to trackio, a local dashboard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import trackio  # pyright: ignore[reportMissingImports]


class TrackioSink:
    """One trackio run; it keeps the run itself, because `trackio.log` looks for that of the calling thread."""

    def __init__(self, project: str, name: str, config: Mapping[str, Any]) -> None:
        self._run = trackio.init(project=project, name=name, config=dict(config), embed=False)

    def scalars(self, step: int, values: Mapping[str, float], attempt: int | None = None) -> None:
        self._run.log(dict(values), step=step)

    def text(self, step: int, message: str) -> None:
        self._run.log({"surefoot": message}, step=step)

    def rewound(self, step: int) -> None:
        """Nothing to do: undone points stay, and the step goes back."""

    def close(self, code: int = 0) -> None:
        self._run.finish()
