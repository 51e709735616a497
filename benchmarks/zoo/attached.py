"""A run of the zoo with surefoot attached: watched and recorded, or protected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor, nn

import surefoot
from benchmarks.zoo.families import Batch
from benchmarks.zoo.training import Protector, Run
from surefoot.guard.attach import Guard
from surefoot.judge.policy import Policy
from surefoot.records import Action, StepMetrics

LOOKS = {"weights_every": 10, "system_every": 0.05, "snapshot_every": 10}
"""The runs of the zoo are short: weights, memory and states are taken more often than a long run needs."""


class Attached(Protector):
    """surefoot itself: attached to the run, with a run directory of its own."""

    def __init__(self, run_dir: Path, *, observe: bool) -> None:
        self._run_dir = run_dir
        self._observe = observe
        self._guard: Guard | None = None

    def begin(self, run: Run, model: nn.Module) -> None:
        policy = Policy(observe=self._observe, **LOOKS)
        self._guard = surefoot.attach(model, run.optimizer, run_dir=self._run_dir, policy=policy, scaler=run.scaler)

    def watch(self, loss: Tensor, batch: Batch) -> Tensor:
        return loss if self._guard is None else self._guard.watch(loss, batch.x)

    def examine(self, run: Run) -> None:
        if self._guard is not None:
            self._guard.report(eval_loss=run.examine())

    def end(self) -> None:
        if self._guard is None:
            return
        self._guard.close()
        events = surefoot.read(self._run_dir).events
        done = [e for e in events if e["kind"] == "decision" and e["applied"] and e["action"] != Action.RELAX]
        self.acted = sorted({e["attempt"] for e in done})


def rows_of(run_dir: Path) -> Iterator[StepMetrics]:
    """The rows of a recorded run, to single precision, as they were judged."""
    yield from surefoot.read(run_dir).scalars.as_rows()
