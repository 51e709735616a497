"""Sends a run's metrics to MLflow, where MLFLOW_TRACKING_URI says; without it, to ./mlruns."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

_EVENTS = "surefoot-events.txt"


class MlflowSink:
    """One MLflow run. It uses the client, not `mlflow.log_metric`, whose current run belongs to a thread."""

    def __init__(self, project: str, name: str, config: Mapping[str, Any]) -> None:
        self._client = MlflowClient()
        experiment = self._client.get_experiment_by_name(project)
        number = self._client.create_experiment(project) if experiment is None else experiment.experiment_id
        self._run = self._client.create_run(number, run_name=name).info.run_id
        self._lines: list[str] = []
        for key, value in config.items():
            self._client.log_param(self._run, str(key), str(value)[:500])

    def scalars(self, step: int, values: Mapping[str, float], attempt: int | None = None) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._run, metrics=[Metric(name, value, now, step) for name, value in values.items()])

    def text(self, step: int, message: str) -> None:
        self._lines.append(f"step {step} {message}")
        self._client.log_text(self._run, "\n".join(self._lines) + "\n", _EVENTS)

    def rewound(self, step: int) -> None:
        """Nothing to do: undone points stay, and the step goes back."""

    def close(self, code: int = 0) -> None:
        self._client.set_terminated(self._run, "FINISHED" if code == 0 else "FAILED")
