"""A judge that makes the decisions a test plans, and a guarded training run."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from rewind_runs import Run, batch
from torch import Tensor

from surefoot.records import Action, Decision, Event, StepMetrics, StepOverrides


class Scripted:
    """Makes the planned decision at each attempt; a snapshot is confirmed by the next `proves` rows."""

    def __init__(self, plan: Mapping[int, Mapping[str, Any]], *, proves: int = 1) -> None:
        self.plan = dict(plan)
        self.proves = proves
        self.proven = -1
        self.quiet = True
        self.wants_weight_check = False
        self.names: Sequence[str] = ()
        self.seen: list[int] = []
        self.rewinds: list[tuple[int, int]] = []
        self.failures: list[str] = []

    def update(self, row: StepMetrics, layers: Any = None) -> list[Event]:
        repeated = bool(self.seen) and self.seen[-1] == row.attempt
        self.seen.append(row.attempt)
        self.proven = row.attempt - self.proves
        planned = None if repeated else self.plan.get(row.attempt)
        if planned is None:
            return []
        fields = {"action": Action.CONSTRAIN, "reason": "scripted"} | planned
        return [Decision(step=row.step, attempt=row.attempt, time=row.time, **fields)]

    def rewound(self, attempt: int, step: int) -> None:
        self.rewinds.append((attempt, step))

    def failed(self, decision: Decision, why: str) -> None:
        self.failures.append(why)

    def rewired(self, names: Sequence[str], scopes: Any) -> None:
        self.names = names


def script(guard: Any, plan: Mapping[int, Mapping[str, Any]], **options: Any) -> Scripted:
    """Replace the guard's judge by one that follows this plan."""
    judge = Scripted(plan, **options)
    judge.names = guard._reader.judge.names
    guard._reader.judge = judge
    return judge


def set_overrides(guard: Any, **values: Any) -> None:
    """Set overrides from the next step on, as a decision would."""
    guard._recovery.overrides.set(StepOverrides(**values))


class Watched(Run):
    """A run of the checkpoint tests whose loss a guard can watch."""

    watch: Callable[..., Tensor] = staticmethod(lambda loss, batch: loss)

    def loss(self, i: int, factor: float) -> Tensor:
        x, y = batch(i)
        x = x + random.random() * 0.01 + float(np.random.rand()) * 0.01
        loss = (self.forward(x.to(self.device)) - y.to(self.device)).square().mean() * factor
        loss = self.watch(loss, x)
        return loss if self.scaler is None else self.scaler.scale(loss)

    def scheduled(self) -> Watched:
        self.schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 40)]
        return self
