"""Surefoot as a protector of zoo runs: it observes and records, or protects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor, nn

import surefoot
from benchmarks.zoo.families import MicroBatch
from benchmarks.zoo.training import Protector, ZooRun
from surefoot.guard.attach import Guard
from surefoot.judge.policy import Policy
from surefoot.records import Action, StepMetrics

DENSE_MEASUREMENT = {"weights_every": 10, "system_every": 0.05, "snapshot_every": 10}
"""Zoo runs are short: weights and memory are measured, and snapshots taken, more often than in a long run."""


class SurefootProtector(Protector):
    """Attaches surefoot to the run, with its own run directory."""

    def __init__(self, run_dir: Path, *, observe: bool, trials: bool = True) -> None:
        self._run_dir = run_dir
        self._observe = observe
        self._trials = trials
        """Give surefoot a `step_fn`, so that it can run trials."""
        self._run: ZooRun | None = None
        self._guard: Guard | None = None

    def begin(self, run: ZooRun, model: nn.Module) -> None:
        policy = Policy(observe=self._observe, **DENSE_MEASUREMENT)
        self._run = run
        self._guard = surefoot.attach(
            model,
            run.optimizer,
            run_dir=self._run_dir,
            policy=policy,
            scaler=run.scaler,
            step_fn=run.loss_again if self._trials else None,
        )

    def watch(self, loss: Tensor, batch: MicroBatch) -> Tensor:
        if self._guard is None or self._run is None:
            return loss
        return self._guard.watch(loss, {"x": batch.x, "y": batch.y, "extra": batch.extra, "step": self._run.step})

    def evaluate(self, run: ZooRun) -> None:
        if self._guard is not None:
            self._guard.report(eval_loss=run.eval_loss())

    def end(self) -> None:
        if self._guard is None:
            return
        self._guard.close()
        events = surefoot.read(self._run_dir).events
        decisions = [e for e in events if e["kind"] == "decision" and e["applied"] and e["action"] != Action.RELAX]
        self.acted = sorted({e["attempt"] for e in decisions})


def recorded_rows(run_dir: Path) -> Iterator[StepMetrics]:
    """The rows of a recorded run in single precision, as they were judged."""
    yield from surefoot.read(run_dir).scalars.as_rows()
