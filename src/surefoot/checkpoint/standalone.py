"""Checkpoints for a loop of your own, without the rest of surefoot: saved behind its back, resumed to the bit."""

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
from surefoot.checkpoint.manager import CheckpointManager, Resumed
from surefoot.checkpoint.save_interval import SaveInterval
from surefoot.checkpoint.store import Retention
from surefoot.checkpoint.train_state import TrainState

log = logging.getLogger("surefoot")
PROOF = 10
"""Updates after which a checkpoint counts as good, if nobody has said otherwise."""


class Checkpoints:
    """Saves a run in one process as it goes.

        checkpoints = surefoot.checkpoint.Checkpoints("runs/a", model, optimizer, loader=loader)
        checkpoints.resume()
        for batch in loader:
            ...
            optimizer.step()
            checkpoints.step(loss=loss)

    Every `every` updates and every `seconds` a checkpoint is saved; what it costs the loop is one copy in memory. As a
    context manager it saves the end, too, unless that is an error.
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
            if position.keeper is not None:
                extra["_loader"] = position.keeper
        whole = TrainState(model, optimizer, scheduler=scheduler, scaler=scaler, extra=extra)
        self.count = 0
        """Updates so far, those before a resume counted."""
        self._keeping = CheckpointManager(
            Path(run_dir) / "checkpoints", whole, tell=_tell, pace=SaveInterval(every, seconds), keep=keep
        )

    def resume(self) -> Resumed | None:
        """Go on from the newest checkpoint that is whole; None where there is none."""
        self._keeping.clean()
        kept = self._keeping.newest()
        if kept is None:
            return None
        resumed = self._keeping.resume(kept)
        self.count = resumed.step
        return resumed

    def step(self, **metrics: float | Tensor) -> None:
        """An update was done; to be called after every one, before the next forward pass.

        A number that is still on a device is read when a checkpoint is written, and not waited for here.
        """
        several = [name for name, value in metrics.items() if isinstance(value, Tensor) and value.numel() != 1]
        if several:
            raise ValueError(f"{', '.join(several)}: a metric is one number; hand in its mean, say")
        self.count += 1
        self._keeping.metrics |= {n: v.detach() if isinstance(v, Tensor) else float(v) for n, v in metrics.items()}
        self._keeping.settle()
        if self._keeping.due(self.count):
            self._keeping.take(self.count)
        self._keeping.row_read(self.count, self.count, lambda: None)
        self._keeping.prove(self.count - PROOF)

    def save(self, *, kind: str = "regular") -> bool:
        """Save now, and wait until it is done; whether it is."""
        outcome = self._keeping.save(self.count, self.count, None, kind=kind)
        return outcome is not None and not outcome.error

    def close(self) -> None:
        """Wait for the save that is under way."""
        self._keeping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self.count > max(self._keeping.saved_step, 0):
            self.save()
        self.close()


def _tell(name: str, words: str, values: Mapping[str, Any]) -> None:
    log.log(logging.INFO if name == "saved" else logging.WARNING, "surefoot: %s", words)
