"""Writes a run's metrics as TensorBoard event files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TensorBoardSink:
    """Event files in the run directory. After a resume or rewind a new file makes TensorBoard hide undone steps."""

    def __init__(self, folder: Path, *, resumed_at: int | None = None) -> None:
        self._folder = folder
        self._writer = self._open(resumed_at)

    def _open(self, step: int | None) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self._folder), purge_step=None if step is None else step + 1, flush_secs=10)

    def scalars(self, step: int, values: Mapping[str, float], attempt: int | None = None) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def text(self, step: int, message: str) -> None:
        self._writer.add_text("surefoot", message, step)

    def rewound(self, step: int) -> None:
        self._writer.close()
        self._writer = self._open(step)

    def close(self, code: int = 0) -> None:
        self._writer.close()
