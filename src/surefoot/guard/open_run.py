"""A run that a guard joins: its journal is opened, and it goes on from where it was."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.checkpoint.buffers import BufferShadow
from surefoot.checkpoint.tree import Stateful
from surefoot.gate.veto import VetoMethod, could_be_fused, on_accelerator
from surefoot.guard.metrics_reader import MetricsReader
from surefoot.guard.recovery import Recovery
from surefoot.guard.run_info import open_together
from surefoot.guard.step_pipeline import StepPipeline
from surefoot.judge.multi_optimizer import AnyJudge
from surefoot.judge.policy import Policy
from surefoot.measure.system import StepTimer

if TYPE_CHECKING:
    from surefoot.guard.checkpointer import Checkpointer

log = logging.getLogger("surefoot")


def open_metrics_reader(
    rounds: StepPipeline,
    optimizer: Optimizer,
    judge: AnyJudge,
    *,
    run_dir: str | os.PathLike[str],
    info: dict[str, Any],
    policy: Policy,
    clock: StepTimer,
    steps_of: int | None = None,
) -> MetricsReader:
    """Open the journal and introduce the run; it is closed with the optimizer, should nobody close the guard."""
    journal = open_together(rounds.meter.ranks, run_dir, info)
    weakref.finalize(optimizer, journal.close)
    desk = MetricsReader(journal, judge, policy=policy, clock=clock, order=rounds.order, steps_of=steps_of)
    journal.layout(rounds.layout.names, rounds.layout.numels)
    desk.note("attached", "; ".join(g.why for g in rounds.gates), attempt=journal.last_attempt + 1)
    for gate in rounds.gates:
        if gate.veto_method is VetoMethod.HOST and on_accelerator(rounds.layout.params) and journal.rank == 0:
            log.log(logging.WARNING if could_be_fused(gate.optimizer) else logging.INFO, "surefoot: %s", gate.why)
    return desk


def open_checkpointer(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    *,
    run_dir: Path,
    rounds: StepPipeline,
    desk: MetricsReader,
    footing: Recovery,
    policy: Policy,
    scheduler: Sequence[Stateful],
    extra: Mapping[str, Any],
    loader: Any,
    shadow: BufferShadow | None,
    step_fn: Callable[[nn.Module, Any], Tensor] | None,
) -> Checkpointer:
    """Go on from where the run was, and save it from here on."""
    from surefoot.guard.checkpointer import (
        Checkpointer,  # brings torch.distributed.checkpoint along, which takes a while
    )

    anchor = Checkpointer(
        model,
        optimizers,
        run_dir=run_dir,
        rounds=rounds,
        desk=desk,
        footing=footing,
        policy=policy,
        scheduler=scheduler,
        extra=extra,
        loader=loader,
        shadow=shadow,
        step_fn=step_fn,
    )
    anchor.resume()
    anchor.listen()
    footing.on_return, footing.on_stop = anchor.went_back, anchor.stopped
    if shadow is not None:
        shadow.reset()
    return anchor
