"""Trains a run in a sandbox: whatever is tried inside, afterwards the run is bit for bit as it was."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.actions.force_float32 import ForceFloat32
from surefoot.checkpoint.copies import StateCopy
from surefoot.checkpoint.rng import set_rng_states
from surefoot.checkpoint.train_state import TrainState
from surefoot.checkpoint.tree import tensors_in
from surefoot.measure.layout import to_local
from surefoot.trials.data_parallel import DataParallelPasses
from surefoot.trials.kept_steps import KeptStep, Options, TakenStep
from surefoot.trials.rank_agreement import RankAgreement, RankFailed, TrialFailed

StepFn = Callable[[nn.Module, Any], Tensor]
SAME_LOSS_TOLERANCE = 0.02
"""A loss that differs from step_fn's by a smaller fraction is the same."""


class StepFnFailed(TrialFailed):
    """The user's step_fn or the backward of its loss raised, or it returned no loss; the message says what."""


class UpdateFailed(TrialFailed):
    """An optimizer's step failed on some of the ranks, so that their weights differ now."""


class Sandbox:
    """One model and its optimizers, trained by `step_fn` without the loop and without the guard's hooks.

    On several ranks all of them call the same methods in the same order. Losses and norms are those over all ranks, the
    same on each, and what fails on one rank is raised on all of them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        step_fn: StepFn,
        train_state: TrainState,
        *,
        loss_scale: Callable[[], Tensor | None],
        agreement: RankAgreement | None = None,
    ) -> None:
        self._model, self._optimizers, self._step_fn = model, optimizers, step_fn
        self._train_state = train_state
        """Restores the whole run, with everything a step might touch."""
        self._loss_scale = loss_scale
        self._params = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        self.agreement = agreement or RankAgreement()
        self._passes = DataParallelPasses(model, self._params, self.agreement)

    @contextmanager
    def opened(self) -> Iterator[StateCopy]:
        """Yields a copy of the run as it is; on leaving, the run is that again."""
        grads = [(p, p.grad) for p in self._params]
        modes = [(m, m.training) for m in self._model.modules()]
        options = [[dict(group) for group in o.param_groups] for o in self._optimizers]
        now = self.agreement.together(self._train_state.capture)
        try:
            with self.borrowed():
                yield now
        finally:
            self._train_state.restore(now)
            for optimizer, groups in zip(self._optimizers, options, strict=True):
                for group, before in zip(optimizer.param_groups, groups, strict=True):
                    group.update(before)
            for module, training in modes:
                module.training = training
            for p, grad in grads:
                p.grad = grad
            torch.clear_autocast_cache()

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Train the run itself: its gradients are dropped, everything else is left as it becomes."""
        with ExitStack() as stack:
            stack.enter_context(self._passes.local())
            for p in self._params:
                p.grad = None
            stack.enter_context(torch.enable_grad())
            if torch.is_autocast_enabled(self._device.type):  # the loop's own; step_fn has its own, too
                stack.enter_context(torch.autocast(self._device.type, enabled=False))
            yield
        torch.clear_autocast_cache()

    def retake(self, rewind: Callable[[], None], take: Callable[[], dict[int, TakenStep]]) -> dict[int, TakenStep]:
        """Rewind the run and train it on; where ranks would end with different weights, it stays rewound."""
        with self.borrowed():
            self.agreement.together(rewind)
            try:
                return take()
            except UpdateFailed:
                self.agreement.together(rewind)
                return {}

    @property
    def _device(self) -> torch.device:
        return self._params[0].device

    def restore(self, state: StateCopy) -> None:
        """Continue from a snapshot of the whole run."""
        self.agreement.together(lambda: self._train_state.restore(state))

    # -- the optimizers' state

    def optimizer_tensors(self) -> list[Tensor]:
        """Copies of all tensors in the optimizers' state."""
        return self.agreement.together(lambda: [t.clone() for t in self._optimizer_tensors()])

    @torch.no_grad()
    def set_optimizer_tensors(self, values: Sequence[Tensor]) -> bool:
        """Put such copies back; False, and nothing is changed, where they do not fit."""
        tensors = list(self._optimizer_tensors())
        if self.agreement.any([t.shape for t in tensors] != [t.shape for t in values]):
            return False
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
        return True

    @torch.no_grad()
    def clear_optimizers(self) -> None:
        """Let the optimizers begin anew: moments, momentum and step counters of 0."""
        for tensor in self._optimizer_tensors():
            tensor.zero_()

    def _optimizer_tensors(self) -> Iterator[Tensor]:
        for optimizer in self._optimizers:
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                yield from tensors_in(getattr(optimizer, "optim", optimizer).state.get(p, {}))  # inside a sharded one

    # -- one update

    def train_step(
        self,
        step: KeptStep,
        *,
        options: Sequence[Options],
        loss_factor: float = 1.0,
        max_norm: float = math.inf,
        apply: bool = True,
    ) -> tuple[float, float]:
        """Take a kept step again, with these options; returns loss and gradient norm.

        An update whose gradients are not finite is refused, as by the gate.
        """
        scale = self._loss_scale()
        loss = self._passes.backward(lambda: self._backward(step, loss_factor, scale), step.total_weight)
        grads = [to_local(p.grad) for p in self._params if p.grad is not None]
        if scale is not None and grads:
            torch._foreach_div_(grads, scale.to(grads[0].device))
        norm = self._clip(grads, max_norm)
        if apply and math.isfinite(norm) and math.isfinite(loss):
            try:
                self.agreement.together(lambda: self._step_optimizers(options))
            except RankFailed as error:
                raise UpdateFailed(str(error)) from error
        for p in self._params:
            p.grad = None
        return loss, norm

    def _step_optimizers(self, options: Sequence[Options]) -> None:
        for optimizer, groups in zip(self._optimizers, options, strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(values)
            bare_step(optimizer)

    def _backward(self, step: KeptStep, loss_factor: float, scale: Tensor | None) -> float:
        """Gradients of this rank's batches; returns their loss."""
        set_rng_states(step.rng_states)
        total = 0.0
        for batch, weight in zip(step.batches, step.loss_weights(), strict=True):
            loss, factor = self._loss(batch), loss_factor * weight
            try:
                (loss * factor if scale is None else loss * (factor * scale.to(loss.device))).backward()
            except Exception as error:  # of the user's model, or out of memory
                raise StepFnFailed(f"backward failed on a kept batch: {type(error).__name__}: {error}") from error
            total += float(loss.detach()) * factor
        return total

    def _loss(self, batch: Any) -> Tensor:
        torch.clear_autocast_cache()
        try:
            loss = self._step_fn(self._model, batch)
        except Exception as error:
            raise StepFnFailed(f"step_fn failed on a kept batch: {type(error).__name__}: {error}") from error
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise StepFnFailed(f"step_fn must return the loss, a tensor with one element, not {type(loss).__name__}")
        return loss.reshape(())

    def _clip(self, grads: list[Tensor], max_norm: float) -> float:
        if not grads:
            return math.nan
        norm = self._passes.total_norm(float(torch.nn.utils.get_total_norm(grads)))
        if norm > max_norm:
            torch._foreach_mul_(grads, max_norm / norm)
        return norm

    # -- probes

    def losses(self, steps: Sequence[KeptStep], batches: Sequence[Sequence[Any]] | None = None) -> list[float]:
        """The loss of each of these steps, or of these on other batches, with the weights as they are; buffers may
        change."""
        pairs = list(zip(steps, batches or [step.batches for step in steps], strict=True))
        return self._passes.losses(
            lambda: [self._loss_of(step, parts) for step, parts in pairs],
            lambda: [step.total_weight() for step in steps],
            len(steps),
        )

    @torch.no_grad()
    def _loss_of(self, step: KeptStep, batches: Sequence[Any]) -> float:
        set_rng_states(step.rng_states)
        weighted = zip(batches, step.loss_weights(), strict=True)
        return sum(float(self._loss(batch)) * weight for batch, weight in weighted)

    def loss_factor(self, step: KeptStep) -> float:
        """What the loop multiplies step_fn's loss by, such as a weight: in the state from before this step; 1 where
        that is unknown."""
        if step.row is None or not math.isfinite(step.row.loss):
            return 1.0
        loss = self.losses([step])[0]
        ratio = step.row.loss / loss if loss else math.nan
        return ratio if math.isfinite(ratio) and abs(ratio - 1.0) > SAME_LOSS_TOLERANCE else 1.0

    @contextmanager
    def float32(self, *, enabled: bool) -> Iterator[None]:
        """The model computes in float32 inside, where it can."""
        force = ForceFloat32(self._model)
        force.set_enabled(enabled and force.unsupported_reason() is None)
        try:
            yield
        finally:
            force.set_enabled(False)


def bare_step(optimizer: Optimizer) -> None:
    """The optimizer's own step, without the hooks on it and without what schedulers put around it."""
    step: Any = type(optimizer).step
    step = step.__wrapped__ if getattr(step, "hooked", False) and hasattr(step, "__wrapped__") else step
    step(optimizer)
