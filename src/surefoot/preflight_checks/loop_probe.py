"""What every fact is given: the parts of the loop, observations of step_fn, and ways to repeat it with one change."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from surefoot.checkpoint.tree import tensors_in
from surefoot.preflight_checks.observe import Changes, Observation, observe
from surefoot.preflight_checks.short_training import STEPS, RangeTest, ShortTraining, Trainer, group_peak
from surefoot.trials.kept_steps import copied

SEED = 0
PROBE_ROWS = 8


class CannotTell(Exception):
    """A fact cannot be known for this loop; the message says why."""


@dataclass(slots=True)
class Settings:
    """What is known about the run besides its four parts."""

    scheduler: Any = None
    total_steps: int | None = None
    clip: float | None = None
    eval_batches: Sequence[Any] = ()
    deadline: float = 0.0
    """By `time.monotonic`."""
    steps: int = STEPS
    """Updates of the short training."""

    @property
    def time_left(self) -> float:
        return self.deadline - time.monotonic()


@dataclass
class PreflightContext:
    """One training loop, inside a sandbox: whatever facts do to it is undone."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    batches: Sequence[Any]
    step_fn: Callable[[nn.Module, Any], Tensor]
    settings: Settings
    trainer: Trainer
    _seen: dict[int, Observation] = field(default_factory=dict)
    _quick: dict[int, Observation] = field(default_factory=dict)

    # -- observations

    def observed(self, index: int = 0) -> Observation:
        """What step_fn does with this batch, with its graph; the same object each time."""
        if index not in self._seen:
            self._seen[index] = self._observe(self.batches[index], None)
        return self._seen[index]

    def keep(self, index: int, seen: Observation) -> None:
        """Use this as the observation of a batch."""
        self._seen[index] = seen

    def forget(self) -> None:
        """Drop all observations, and their graphs."""
        self._seen.clear()
        self._quick.clear()

    @property
    def first(self) -> Observation:
        return self.observed(0)

    def repeat(self, changes: Changes | None = None, index: int = 0) -> Observation:
        """The same call again, without a graph, with batch norm on its running statistics."""
        with torch.no_grad(), self._fixed_norms():
            return self._observe(self._first_rows(self.batches[index]), changes)

    def _first_rows(self, batch: Any) -> Any:
        """The first samples of a batch: enough to compare outputs, and quicker."""
        return _sliced(batch, self.batch_size) if self.probe_size < self.batch_size else batch

    def quick(self, index: int) -> Observation:
        """What step_fn does with this batch, with or without its graph."""
        if index in self._seen:
            return self._seen[index]
        if index not in self._quick:
            self._quick[index] = self.repeat(index=index)
        return self._quick[index]

    def loss_of(self, batch: Any) -> Tensor:
        """The loss of another batch, as `repeat` computes it."""
        with torch.no_grad(), self._fixed_norms():
            return self._observe(self._first_rows(batch), None).loss

    def _observe(self, batch: Any, changes: Changes | None) -> Observation:
        seed_all()
        return observe(self.step_fn, self.model, copied(batch), changes)

    @contextmanager
    def _fixed_norms(self) -> Iterator[None]:
        norms = [m for m in self.model.modules() if isinstance(m, _BatchNorm) and m.training]
        for m in norms:
            m.training = m.running_mean is None
        try:
            yield
        finally:
            for m in norms:
                m.training = True

    @cached_property
    def base(self) -> Observation:
        """The first batch, observed as `repeat` does; raises CannotTell where two calls differ."""
        try:
            base = self.repeat()
        except Exception:  # of step_fn: it wants whole batches
            self.probe_size = self.batch_size
            base = self.repeat()
        again = self.repeat()
        if len(base.outputs) != len(again.outputs) or not all(
            a.shape == b.shape and torch.equal(a, b) for a, b in zip(base.outputs, again.outputs, strict=True)
        ):
            raise CannotTell("two calls of step_fn with the same batch and the same seed give other outputs")
        if not base.outputs:
            raise CannotTell("step_fn does not call the model itself, or it returns no floating-point tensor")
        return base

    # -- sizes

    @cached_property
    def batch_size(self) -> int:
        """The first dimension on which all tensors of the batch agree, or all inputs of the model; else 0."""
        for tensors in (tensors_in(self.batches[0]), self.first.inputs):
            sizes = {t.shape[0] for t in tensors if t.dim()}
            if len(sizes) == 1:
                return sizes.pop()
        return 0

    @cached_property
    def probe_size(self) -> int:
        """The samples of a batch that `repeat` uses."""
        sizes = {t.shape[0] for t in tensors_in(self.batches[0]) if t.dim()}
        return min(self.batch_size, PROBE_ROWS) if sizes == {self.batch_size} else self.batch_size

    @cached_property
    def param_names(self) -> dict[int, str]:
        return {id(p): name for name, p in self.model.named_parameters()}

    @cached_property
    def held(self) -> list[Tensor]:
        """Every parameter of every optimizer, also those held twice."""
        return [p for o in self.optimizers for group in o.param_groups for p in group["params"]]

    @cached_property
    def has_warmup(self) -> bool:
        """Whether a scheduler has lowered the first rates."""
        groups = [group for o in self.optimizers for group in o.param_groups]
        return any(float(group["lr"]) < 0.99 * group_peak(group) for group in groups)

    # -- training

    @cached_property
    def training(self) -> ShortTraining:
        """Some real updates at the rate asked for."""
        return self.trainer.train(self.batches, steps=self.settings.steps)

    @cached_property
    def range_test(self) -> RangeTest:
        """The same updates at other rates, from the same state."""
        return self.trainer.range_test(self.batches, self.training)


def seed_all() -> None:
    """The same random numbers each time; the sandbox restores the run's own."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def _sliced(value: Any, size: int) -> Any:
    if isinstance(value, Tensor):
        return value[:PROBE_ROWS] if value.dim() and value.shape[0] == size else value
    if isinstance(value, dict):
        return {name: _sliced(part, size) for name, part in value.items()}
    return type(value)(_sliced(part, size) for part in value) if type(value) in (list, tuple) else value
