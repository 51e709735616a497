"""Checkpoints for any training loop, without the rest of surefoot: saved in the background, resumed bit for bit."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.checkpoint.dataloader import position_of
from surefoot.checkpoint.manager import CheckpointManager, Resumed, SaveInterval
from surefoot.checkpoint.store import Retention
from surefoot.checkpoint.train_state import TrainState

log = logging.getLogger("surefoot")
HEALTHY_AFTER = 10
"""Updates after which a checkpoint is marked healthy."""


class Checkpoints:
    """Saves the checkpoints of a run in one process.

        checkpoints = surefoot.checkpoint.Checkpoints("runs/a", model, optimizer, loader=loader)
        checkpoints.resume()
        for batch in loader:
            ...
            optimizer.step()
            checkpoints.step(loss=loss)

    Saves every `every` updates and every `seconds`; training waits only for one copy in memory. As a context manager it
    also saves at the end, unless an exception was raised.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        scheduler: Any = None,
        scaler: Any = None,
        loader: Any = None,
        extra: Mapping[str, Any] | None = None,
        every: int = 1000,
        seconds: float = 3600.0,
        keep: Retention | None = None,
    ) -> None:
        if not every >= 1 or not seconds > 0:
            raise ValueError(f"every must be at least 1 and seconds above 0; got every={every}, seconds={seconds}")
        extra = dict(extra or {})
        if loader is not None:
            position = position_of(loader)
            if position.warning:
                log.warning("surefoot: %s", position.warning)
            if position.stateful is not None:
                extra["_loader"] = position.stateful
        train_state = TrainState(model, optimizer, scheduler=scheduler, scaler=scaler, extra=extra)
        self.count = 0
        """Updates so far, including those before a resume."""
        self._manager = CheckpointManager(
            Path(run_dir) / "checkpoints",
            train_state,
            on_event=_log_event,
            interval=SaveInterval(every, seconds),
            keep=keep,
        )

    def resume(self) -> Resumed | None:
        """Load the newest complete checkpoint; None if there is none."""
        self._manager.clean()
        checkpoint = self._manager.newest()
        if checkpoint is None:
            return None
        resumed = self._manager.resume(checkpoint)
        self.count = resumed.step
        return resumed

    def step(self, **metrics: float | Tensor) -> None:
        """To be called after every update, before the next forward pass.

        A metric that is still on a device is read when a checkpoint is written, and not waited for here.
        """
        several = [name for name, value in metrics.items() if isinstance(value, Tensor) and value.numel() != 1]
        if several:
            raise ValueError(f"{', '.join(several)}: a metric must be a single number, such as a mean")
        self.count += 1
        self._manager.metrics |= {n: v.detach() if isinstance(v, Tensor) else float(v) for n, v in metrics.items()}
        self._manager.before_update()
        if self._manager.due(self.count):
            self._manager.capture(self.count)
        self._manager.metrics_read(self.count, self.count, lambda: None)
        self._manager.mark_healthy(self.count - HEALTHY_AFTER)

    def save(self, *, kind: str = "regular") -> bool:
        """Save now and wait for it; returns whether it succeeded."""
        result = self._manager.save(self.count, self.count, None, kind=kind)
        return result is not None and not result.error

    def close(self) -> None:
        """Wait for the running save."""
        self._manager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self.count > max(self._manager.saved_step, 0):
            self.save()
        self.close()


def _log_event(name: str, message: str, values: Mapping[str, Any]) -> None:
    log.log(logging.INFO if name == "saved" else logging.WARNING, "surefoot: %s", message)
