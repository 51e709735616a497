"""Keeps the last steps of a run, so that a trial can take them again: batches, random states, optimizer options."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from surefoot.checkpoint.rng import RngStates, get_torch_rng_states
from surefoot.checkpoint.snapshot_ages import most_crowded
from surefoot.checkpoint.tree import tensors_in
from surefoot.judge.thresholds import BASELINE_ROWS
from surefoot.records import StepMetrics
from surefoot.trials.rank_agreement import TrialFailed

NUM_PROBES = 8
"""Batches kept to compare states by; their ages grow like those of backups."""
FIRST_PROBE_GAP = 4
"""Steps between two batches that become probes, at least."""
MAX_BATCH_BYTES = 1 << 30
"""Bytes of batches that are kept at most; older steps are dropped first."""
DEVICE_SHARE = 64
"""On a device with less than that many times as much memory, they may take this part of it."""
MIN_PROBES = 3
"""With fewer probe batches, some steps since the snapshot are held out from all branches."""
Options = list[dict[str, Any]]
"""The options of each parameter group of one optimizer, without its parameters."""


class NotKept(TrialFailed):
    """The steps that a trial needs are not kept; the message says why."""


@dataclass(slots=True)
class KeptStep:
    """What one update was made of."""

    attempt: int
    """-1 until the update is complete."""
    rng_states: RngStates
    """Random states of torch before its first forward pass."""
    batches: list[Any] = field(default_factory=list)
    """One batch for each micro-batch."""
    weights: list[Tensor] = field(default_factory=list)
    """The weight of each micro-batch's loss, times whatever the loop multiplies all of them by."""
    versions: list[int] = field(default_factory=list)
    """Version counters of their tensors: a loop may have written other values into them since."""
    options: list[Options] = field(default_factory=list)
    """Options of each optimizer inside its step, overrides included."""
    fetched: list[int] = field(default_factory=list)
    """How many batches the loader had yielded when each was used; -1 where it does not count them."""
    row: StepMetrics | None = None
    """What was measured; arrives two steps later."""
    max_norm: float | None = None
    """The norm its gradients were clipped at; None where only the row can tell."""
    left_out: bool = False
    """The run continues from a branch without this step."""

    @property
    def applied(self) -> bool:
        return self.row is None or self.row.applied

    def loss_weights(self) -> list[float]:
        """The share of each micro-batch in the loss of this rank; waits for the device."""
        count, weights = len(self.batches), self._weights()
        total = sum(weights)
        return [weight / total for weight in weights] if total else [1.0 / count] * count

    def total_weight(self) -> float:
        """How much this rank's loss counts beside those of the others; waits for the device."""
        return sum(self._weights())

    def _weights(self) -> list[float]:
        count = len(self.batches)
        return [float(weight) for weight in self.weights] if len(self.weights) == count else [1.0] * count

    def intact(self) -> bool:
        return [t._version for t in tensors_in(self.batches)] == self.versions


@dataclass(frozen=True, slots=True)
class TakenStep:
    """A kept step that was taken again in a branch."""

    loss: float
    norm: float
    options: Sequence[Options]
    max_norm: float


class StepRecorder:
    """Keeps the last `max_steps` steps, as far as their batches fit into memory.

    Batches are kept by reference. A loop that fills the same tensors again and again is noticed by their version
    counters; from then on they are copied.
    """

    def __init__(self, optimizers: Sequence[Optimizer], *, max_steps: int, loader: Any = None) -> None:
        self._optimizers, self._loader = optimizers, loader
        self._steps: deque[KeptStep] = deque()
        self._max_steps = max_steps
        self._bytes = 0
        self._current: KeptStep | None = None
        self._devices: set[torch.device] = {p.device for o in optimizers for g in o.param_groups for p in g["params"]}
        self._devices = {device for device in self._devices if device.type == "cuda"}
        shares = [torch.cuda.get_device_properties(device).total_memory // DEVICE_SHARE for device in self._devices]
        self._max_bytes = min([MAX_BATCH_BYTES, *shares])
        self._copy_batches = False
        self._probes: list[KeptStep] = []
        """Steps of which it is known that the run was healthy, oldest first."""

    def __iter__(self) -> Iterator[KeptStep]:
        return iter(self._steps)

    def load(self, steps: Sequence[KeptStep], probes: Sequence[KeptStep]) -> None:
        """Continue with steps and probes that another recorder kept."""
        self._steps.extend(steps)
        self._probes.extend(probes)

    # -- called in every step

    def forward_began(self) -> None:
        """A forward pass begins; the first one after a step begins the next update."""
        if self._current is None:
            self._current = KeptStep(-1, get_torch_rng_states(self._devices))

    def watched(self, batch: Any) -> None:
        if self._current is None:
            return
        if self._steps and not self._copy_batches and not self._steps[-1].intact():
            self._copy_batches = True
        kept = copied(batch) if self._copy_batches else batch
        self._current.batches.append(kept)
        self._current.fetched.append(getattr(self._loader, "num_fetched", -1))
        self._current.versions += [t._version for t in tensors_in(kept)]

    def backward_ended(self, weight: Tensor) -> None:
        """The gradient that backward began with says how much the loss counts."""
        if self._current is not None:
            self._current.weights.append(weight)

    def before_step(self, k: int) -> None:
        """Optimizer `k` is about to step, with the overrides in force."""
        if self._current is not None:
            self._current.options.append(options_of(self._optimizers[k]))

    def step_ended(self, attempt: int) -> None:
        """The update is complete: keep it, and drop what is too old."""
        if self._current is None:
            return
        self._current.attempt = attempt
        self._steps.append(self._current)
        self._bytes += num_bytes(self._current.batches)
        self._current = None
        while len(self._steps) > self._max_steps or (self._bytes > self._max_bytes and self._steps):
            self._bytes -= num_bytes(self._steps.popleft().batches)

    def restart(self, num_batches: int) -> RngStates | None:
        """The update in progress is begun again; returns the random states from before its first forward pass.

        None where it was not the first to use them: a loss scale that overflows skips an update unseen.
        """
        current, self._current = self._current, None
        return None if current is None or len(current.batches) > num_batches else current.rng_states

    def trust(self, attempt: int) -> None:
        """Steps up to this attempt were healthy: keep some of them as probes."""
        newest = self._probes[-1].attempt if self._probes else -FIRST_PROBE_GAP
        if attempt < newest + FIRST_PROBE_GAP:
            return
        step = next((s for s in reversed(self._steps) if s.attempt <= attempt and _usable_probe(s)), None)
        if step is None or step.attempt < newest + FIRST_PROBE_GAP:
            return
        self._probes.append(step)
        if len(self._probes) > NUM_PROBES:
            attempts = [s.attempt for s in self._probes]
            del self._probes[most_crowded(attempts, range(1, len(attempts) - 1), now=attempts[-1] + 1)]

    def row_read(self, row: StepMetrics) -> None:
        for step in reversed(self._steps):
            if step.attempt <= row.attempt:
                if step.attempt == row.attempt:
                    step.row = row
                return

    # -- called by trials

    def since(self, first: int) -> list[KeptStep]:
        """The steps from this attempt on, unchanged, without those that a trial has left out; raises `NotKept`."""
        if not self._steps or self._steps[0].attempt > first:
            raise NotKept(f"the batches since attempt {first} are not all kept any more")
        steps = [s for s in self._steps if s.attempt >= first and not s.left_out]
        changed = next((s for s in steps if not s.batches or not s.intact()), None)
        if changed is not None:
            raise NotKept(
                f"the batch of attempt {changed.attempt} was changed after its step"
                if changed.batches
                else "guard.watch was given no batch: guard.watch(loss, batch)"
            )
        return steps

    def usable_steps(self) -> list[KeptStep]:
        """All steps that can be taken again."""
        return [s for s in self._steps if s.batches and s.options and not s.left_out and s.intact()]

    def last_refused(self) -> list[KeptStep]:
        """The unbroken run of refused steps that the last rows read were about."""
        refused: list[KeptStep] = []
        for step in reversed(self._steps):
            if step.row is not None and step.row.applied:
                break
            if step.row is not None and step.batches and step.intact():
                refused.insert(0, step)
        return refused

    def probes(self, before: int) -> list[KeptStep]:
        """The probes from before an attempt, oldest first."""
        return [s for s in self._probes if s.attempt < before and s.intact()]

    def replaced(self, taken: Mapping[int, TakenStep], *, since: int) -> None:
        """The run continues from a branch: steps from this attempt on are as they were in it, or left out."""
        for step in self._steps:
            if step.attempt < since:
                continue
            again = taken.get(step.attempt)
            step.left_out |= again is None
            if again is not None:
                step.options, step.max_norm = list(again.options), again.max_norm
                if step.row is not None:
                    step.row = replace(step.row, loss=again.loss, norm=again.norm)

    def forget_probes(self) -> None:
        """The run continues with other data."""
        self._probes.clear()

    def forget_after(self, attempt: int) -> None:
        """Steps after this attempt belong to a run that was undone."""
        while self._steps and self._steps[-1].attempt > attempt:
            self._bytes -= num_bytes(self._steps.pop().batches)
        self._probes = [s for s in self._probes if s.attempt <= attempt]


def _usable_probe(step: KeptStep) -> bool:
    return step.applied and not step.left_out and bool(step.batches) and step.intact()


def options_of(optimizer: Optimizer) -> Options:
    """The options of its parameter groups; tensors among them are copied."""
    return [
        {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


def scaled_lr(options: Sequence[Options], factor: float) -> list[Options]:
    """Optimizer options with another learning rate."""
    return [[group | {"lr": group["lr"] * factor} if "lr" in group else group for group in o] for o in options]


def loop_clip(step: KeptStep) -> float:
    """The norm that this step's gradients were clipped at, by the loop or by the guard."""
    row = step.row
    if step.max_norm is not None or row is None:
        return math.inf if step.max_norm is None else step.max_norm
    if row.applied_norm < 0.999 * row.norm:
        return row.applied_norm
    return row.clip if row.clip_factor < 1.0 else math.inf


def num_bytes(value: Any) -> int:
    return sum(t.nbytes for t in tensors_in(value))


def roll_tensor(value: Any, index: int, *, only: bool) -> Any:
    """A batch in which the tensor of this index (in the order of `tensors_in`) is paired with other samples."""
    counter = itertools.count()

    def change(part: Any) -> Any:
        if isinstance(part, Tensor):
            if next(counter) != index or part.dim() == 0:
                return part
            return part.flip(-1) if only else part.roll(1, 0)
        if isinstance(part, dict):
            return {name: change(item) for name, item in part.items()}
        return type(part)(change(item) for item in part) if type(part) in (list, tuple) else part

    return change(value)


def copied(value: Any) -> Any:
    """A batch with its tensors copied; what is no container of them is kept as it is."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, dict):
        return type(value)({name: copied(part) for name, part in value.items()})
    if type(value) in (list, tuple):
        return type(value)(copied(part) for part in value)
    return value


def ceiling_between(steps: Sequence[KeptStep], onset: int, suspects: frozenset[int]) -> float:
    """A loss above those of the steps before the onset and below those of most suspects; infinite if they overlap."""
    before = [s.row.loss for s in steps if s.row is not None and s.row.applied and s.attempt < onset][-BASELINE_ROWS:]
    harmful = [s.row.loss for s in steps if s.row is not None and s.attempt in suspects]
    if len(before) < MIN_PROBES or not harmful:
        return math.inf
    highest = max(before)
    ceiling = highest + (highest - statistics.median(before)) / 2
    return ceiling if statistics.median(harmful) > ceiling else math.inf
