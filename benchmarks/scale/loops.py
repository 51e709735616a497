"""The loops that every scenario is trained by: bare, with surefoot attached, with a rule that another project ships."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from torch import Tensor

import surefoot
from benchmarks.zoo.other_rules import InterventionRule, SixSigmaSkip, SkipNonFinite, ZClip
from benchmarks.zoo.training import ZooRun

if TYPE_CHECKING:
    from benchmarks.scale.scale_run import ScaleRun

Batch = dict[str, Tensor]
"""`inputs` and `targets`, token ids [batch, context]."""
BARE = "bare"
SUREFOOT = "surefoot"
PEERS: dict[str, Callable[[], InterventionRule]] = {rule.name: rule for rule in (SkipNonFinite, SixSigmaSkip, ZClip)}
"""Rules of other projects, added to the bare loop. It clips at 1.0 already, so a rule that only clips is left out."""


class Loop:
    """The bare loop: nothing intervenes."""

    acted: tuple[int, ...] = ()
    """Steps whose update a rule changed or skipped."""

    def begin(self, run: ScaleRun) -> None:
        """Called before the first update."""

    def watch(self, loss: Tensor, batch: Batch) -> Tensor:
        """Called with each loss before its backward."""
        return loss

    def allows(self, run: ScaleRun, loss: Tensor) -> bool:
        """May change the gradients before the loop clips them; False skips the update."""
        return True

    def evaluated(self, eval_loss: float) -> None:
        """Called after each evaluation."""

    def end(self) -> None:
        """Called after the last update."""


class PeerLoop(Loop):
    """The bare loop with a rule that another project ships."""

    def __init__(self, rule: InterventionRule) -> None:
        self._rule = rule

    def allows(self, run: ScaleRun, loss: Tensor) -> bool:
        allowed = self._rule.allow(cast(ZooRun, run), float(loss.detach()))  # it needs only model and step
        self.acted = tuple(self._rule.acted)
        return allowed


class SurefootLoop(Loop):
    """The bare loop with surefoot attached, with its defaults and a `step_fn`."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._guard: surefoot.Guard | None = None

    def begin(self, run: ScaleRun) -> None:
        self._guard = surefoot.attach(run.model, run.optimizer, run_dir=self._run_dir, step_fn=run.loss)

    def watch(self, loss: Tensor, batch: Batch) -> Tensor:
        return loss if self._guard is None else self._guard.watch(loss, batch)

    def evaluated(self, eval_loss: float) -> None:
        if self._guard is not None:
            self._guard.report(eval_loss=eval_loss)

    def end(self) -> None:
        if self._guard is not None:
            self._guard.close()


def make_loop(name: str, run_dir: Path) -> Loop:
    """The loop of this name; surefoot writes to `run_dir`."""
    if name == BARE:
        return Loop()
    return SurefootLoop(run_dir) if name == SUREFOOT else PeerLoop(PEERS[name]())
