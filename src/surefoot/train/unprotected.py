"""The guard of an unprotected run (`protection.mode: off`): it only collects progress numbers."""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from surefoot.guard.guard import LOSS, OffGuard, Progress
from surefoot.measure.batch_stats import count_samples
from surefoot.records import NAN, StepMetrics

_RECENT_LOSSES = 20
"""Losses kept for the final mean."""


class UnprotectedGuard(OffGuard):
    """Does nothing to the run; it waits for the device only when a progress line is due, and then once."""

    def __init__(self, schedule: LRScheduler, *, every: int, total: int) -> None:
        self._schedule, self._every, self._total = schedule, every, total
        self._losses: list[Tensor] = []
        """Of the micro-batches of the current update, on the device."""
        self._current_step = -1
        self._recent: deque[Tensor] = deque(maxlen=_RECENT_LOSSES)
        self._lr = self._tokens = self._samples = 0.0
        self._last_time = time.monotonic()
        self._row: StepMetrics | None = None

    @property
    def step(self) -> int:
        return self._schedule.last_epoch

    @property
    def history(self) -> tuple[list[float], list[float]]:
        losses = [*self._recent, *([_mean(self._losses)] if self._losses else [])]
        return (torch.stack(losses).tolist() if losses else []), []

    def watch(
        self, loss: Tensor, batch: Any = None, *, progress: Progress = LOSS, tokens: Tensor | float | None = None
    ) -> Tensor:
        if self._current_step != self.step:
            if self._losses:
                self._recent.append(_mean(self._losses))
            self._current_step, self._losses = self.step, []
        self._losses.append(loss.detach())
        self._lr = float(self._schedule.optimizer.param_groups[0]["lr"])
        self._samples += count_samples(batch)
        return loss

    def report(self, **values: float) -> None:
        self._tokens += values.get("tokens", 0.0)

    @property
    def latest(self) -> StepMetrics | None:
        """The last update when its progress line is due; else the row of the line before."""
        due = self.step % self._every == 0 or self.step == self._total or self._row is None
        if due and self._losses and (self._row is None or self._row.attempt < self._current_step):
            now = time.monotonic()
            self._row = StepMetrics(
                step=self._current_step,
                attempt=self._current_step,
                time=time.time(),
                loss=float(_mean(self._losses)),
                lr=self._lr,
                seconds=now - self._last_time,
                samples=self._samples,
                tokens=self._tokens or NAN,
            )
            self._last_time, self._tokens, self._samples = now, 0.0, 0.0
        return self._row


def _mean(losses: list[Tensor]) -> Tensor:
    return torch.stack(losses).double().mean()
