"""What `attach` was given, validated and passed on as one value."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.actions.stop import TrainingStopped
from surefoot.alarms.alarm_target import AlarmTarget
from surefoot.checkpoint.tree import Stateful
from surefoot.gate.clip import ClipOption
from surefoot.judge.policy import Policy
from surefoot.sinks.sink_choice import SinkChoice
from surefoot.story.verbosity import Verbosity


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GuardContext:
    """The validated arguments of `attach`; see there for what each means."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    run_dir: Path
    clip: ClipOption
    policy: Policy
    schedulers: Sequence[Stateful]
    scaler: Any
    """The GradScaler that was passed; `StepPipeline.scaler` is the one in use, which may have been found later."""
    extra: Mapping[str, Any]
    snapshot_memory: int | None
    """Bytes; 0 keeps no snapshots, None takes up to half of what is free."""
    loader: Any
    resume: bool
    step_fn: Callable[[nn.Module, Any], Tensor] | None
    steps_of: int | None
    """Index of the optimizer whose updates are the steps; None where a step is an iteration of the loop."""
    run_info: Mapping[str, Any]
    incident_data: bool
    """Incident bundles hold states and batches, where trials are run."""
    cases: Path | None = None
    """A folder of runs, or a library file, whose incidents are compared with those of this run."""
    preflight: bool = False
    """The loop is checked on its first batches."""
    alarms: tuple[AlarmTarget, ...] = ()
    """Who hears of what happens to the run; the first rank sends."""
    sinks: tuple[SinkChoice, ...] = ()
    """Where else numbers and events go; from the first rank."""
    verbosity: Verbosity = Verbosity.NORMAL
    """What is logged about incidents."""
    step: int = 0
    """Where the count of steps starts."""
    on_stop: Callable[[TrainingStopped], None] | None = None
    """Called instead of raising `TrainingStopped`."""
