"""What stands in for the guard of a run that nothing watches, so that it still tells how it goes."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from surefoot.guard.guard import LOSS, OffGuard, Progress
from surefoot.measure.system import count_samples
from surefoot.records import NAN, StepMetrics

_KEPT = 20
"""Losses that the last mean is made of."""


class Unwatched(OffGuard):
    """Does nothing to the run; the device is waited for only when a line is due, and then once."""

    def __init__(self, schedule: LRScheduler, *, every: int, total: int) -> None:
        self._schedule, self._every, self._total = schedule, every, total
        self._losses: list[Tensor] = []
        """Of the micro-batches of one update, on the device."""
        self._at = -1
        self._recent: deque[Tensor] = deque(maxlen=_KEPT)
        self._rate = self._tokens = self._samples = 0.0
        self._since = time.monotonic()
        self._row: StepMetrics | None = None

    @property
    def step(self) -> int:
        return self._schedule.last_epoch

    @property
    def history(self) -> tuple[list[float], list[float]]:
        losses = [*self._recent, *([_mean(self._losses)] if self._losses else [])]
        return (torch.stack(losses).tolist() if losses else []), []

    def watch(self, loss: Tensor, batch: Any = None, *, progress: Progress = LOSS) -> Tensor:
        if self._at != self.step:
            if self._losses:
                self._recent.append(_mean(self._losses))
            self._at, self._losses = self.step, []
        self._losses.append(loss.detach())
        self._rate = float(self._schedule.optimizer.param_groups[0]["lr"])
        self._samples += count_samples(batch)
        return loss

    def report(self, **values: float) -> None:
        self._tokens += values.get("tokens", 0.0)

    @property
    def latest(self) -> StepMetrics | None:
        """The update that was made last, when its line is due; else the one before."""
        due = self.step % self._every == 0 or self.step == self._total or self._row is None
        if due and self._losses and (self._row is None or self._row.attempt < self._at):
            now = time.monotonic()
            self._row = StepMetrics(
                step=self._at,
                attempt=self._at,
                time=time.time(),
                loss=float(_mean(self._losses)),
                lr=self._rate,
                seconds=now - self._since,
                samples=self._samples,
                tokens=self._tokens or NAN,
            )
            self._since, self._tokens, self._samples = now, 0.0, 0.0
        return self._row


def _mean(losses: list[Tensor]) -> Tensor:
    return torch.stack(losses).double().mean()
