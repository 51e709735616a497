"""Some real updates on a copy of the run's state, and what they did to losses, gradients and weights."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.trials.kept_steps import copied
from surefoot.trials.sandbox import StepFn, bare_step

STEPS = 24
OVERFIT_STEPS = 40
FACTORS = (0.1, 10.0, 0.01)
"""Of the rate asked for."""
PROBES = 3
SAMPLE = 1 << 16
"""Elements of each tensor that are compared before and after an update."""


@dataclass(slots=True)
class ParamHistory:
    """What some updates did to one parameter."""

    name: str
    ndim: int
    grad_norms: list[float] = field(default_factory=list)
    """NaN where it had no gradient."""
    grad_rms: list[float] = field(default_factory=list)
    """Of the elements with a gradient."""
    weight_norms: list[float] = field(default_factory=list)
    update_norms: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    """Fraction of the elements with a gradient that kept their value."""

    @property
    def always_zero(self) -> bool:
        known = [g for g in self.grad_norms if not math.isnan(g)]
        return bool(known) and max(known) == 0.0

    @property
    def never_reached(self) -> bool:
        return bool(self.grad_norms) and all(math.isnan(g) for g in self.grad_norms)

    @property
    def update_ratio(self) -> float:
        """Median update over weight norm; NaN for weights of zero."""
        ratios = [u / w for u, w in zip(self.update_norms, self.weight_norms, strict=True) if w > 0]
        return median(ratios)


@dataclass(slots=True)
class ShortTraining:
    """The updates of one short training."""

    losses: list[float]
    norms: list[float]
    params: list[ParamHistory]
    probe_before: float
    """Mean loss of the probe batches before the first update."""
    probe_after: float
    overwritten: dict[str, bool] = field(default_factory=dict)
    """Parameters that step_fn itself changed; True where it undid the update before."""
    spread: tuple[float, float] = (math.nan, math.nan)
    """How much the model's outputs differ between samples, before and after."""
    seconds_per_step: float = 0.0

    @property
    def diverged(self) -> bool:
        return not all(map(math.isfinite, (self.probe_after, *self.losses, *self.norms)))

    @property
    def update_ratio(self) -> float:
        """Median over the matrices."""
        return median([h.update_ratio for h in self.params if h.ndim >= 2])


@dataclass(frozen=True, slots=True)
class RangeTest:
    """The probe loss after the same number of updates, by the factor of the rate."""

    lr: float
    before: float
    after: Mapping[float, float]
    """By factor; infinite where it diverged."""

    @property
    def best(self) -> float:
        return min(self.after, key=lambda factor: self.after[factor])


class Trainer:
    """Trains a sandboxed model; `restore` puts it back to where it was."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        step_fn: StepFn,
        restore: Callable[[], None],
        *,
        deadline: float,
        clip: float | None = None,
        seeded: Callable[[], Any],
        spread: Callable[[Any], float],
    ) -> None:
        self._model, self._optimizers, self._step_fn = model, optimizers, step_fn
        self.restore, self._deadline, self._clip, self._seeded = restore, deadline, clip, seeded
        self._spread_of = spread
        self._names = {id(p): name for name, p in model.named_parameters()}
        held = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        self._params = list({id(p): p for p in held}.values())
        self.identical: list[str] = []
        """Matrices whose rows were all equal after the training at the rate asked for."""
        self.lr = peak_lr(optimizers)

    def train(self, batches: Sequence[Any], *, factor: float = 1.0, steps: int = STEPS) -> ShortTraining:
        """Train from the initial state, then go back to it."""
        probes = batches[-min(PROBES, len(batches)) :]
        self._set_lr(factor)
        try:
            first = self._spread(batches[0])
            result = self._train(batches, probes, steps)
            if factor == 1.0:
                self.identical = list(self._identical())
                result.spread = first, self._spread(batches[0])
        finally:
            self.restore()
        return result

    def overfit(self, batch: Any) -> ShortTraining | None:
        """Train on one batch alone, at the rate asked for and at others; the one that ends lowest."""
        runs: list[ShortTraining] = []
        for factor in (1.0, 0.1, 10.0):
            if runs and time.monotonic() + runs[0].seconds_per_step * OVERFIT_STEPS > self._deadline:
                break
            runs.append(self.train([batch], factor=factor, steps=OVERFIT_STEPS))
        known = [run for run in runs if not run.diverged]
        return min(known, key=lambda run: run.probe_after, default=None)

    def range_test(self, batches: Sequence[Any], asked: ShortTraining) -> RangeTest:
        after = {1.0: asked.probe_after if not asked.diverged else math.inf}
        for factor in FACTORS:
            if time.monotonic() + asked.seconds_per_step * STEPS > self._deadline:
                break
            if factor == FACTORS[-1] and after[1.0] < asked.probe_before:
                break  # the rate asked for lowers the loss: there is no need to look that far below
            run = self.train(batches, factor=factor, steps=max(len(asked.losses), 2))
            after[factor] = math.inf if run.diverged else run.probe_after
        return RangeTest(self.lr, asked.probe_before, after)

    def _spread(self, batch: Any) -> float:
        self._seeded()
        with torch.no_grad():
            return self._spread_of(batch)

    def _identical(self) -> Iterator[str]:
        for p in self._params:
            rows = p.detach().float()
            name = self._names.get(id(p), "")
            if p.dim() < 2 or p.shape[0] < 2 or not name or not bool((rows != 0).any()):
                continue
            if float((rows - rows[:1]).abs().max()) <= 1e-6 * float(rows.abs().max()):
                yield name

    # -- one training

    def _train(self, batches: Sequence[Any], probes: Sequence[Any], steps: int) -> ShortTraining:
        histories = [ParamHistory(self._names.get(id(p), "(not in the model)"), p.dim()) for p in self._params]
        before = self.mean_loss(probes)
        result = ShortTraining([], [], histories, before, math.nan)
        start = time.monotonic()
        previous: list[Tensor] | None = None
        self._seeded()
        for i in range(steps):
            weights = self._samples()
            loss = self._step_fn(self._model, copied(batches[i % len(batches)]))
            self._note_overwritten(result, weights, previous)
            self._backward(loss)
            result.losses.append(float(loss.detach()))
            result.norms.append(self._total_norm())
            if not math.isfinite(result.losses[-1]) or not math.isfinite(result.norms[-1]):
                break
            previous, weights = weights, self._samples()
            self._update(histories, weights)
            if i >= 2 and time.monotonic() + (time.monotonic() - start) / (i + 1) > self._deadline:
                break
        self._clear()
        result.seconds_per_step = (time.monotonic() - start) / max(len(result.losses), 1)
        result.probe_after = self.mean_loss(probes)
        return result

    def _backward(self, loss: Tensor) -> None:
        self._clear()
        if loss.requires_grad:
            loss.reshape(()).backward()

    def _total_norm(self) -> float:
        grads = [p.grad for p in self._params if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(grads)) if grads else 0.0
        if self._clip is not None and norm > self._clip:
            torch._foreach_mul_(grads, self._clip / norm)
        return norm

    def _update(self, histories: list[ParamHistory], weights: list[Tensor]) -> None:
        grads = [None if p.grad is None else _sample(p.grad).clone() for p in self._params]
        for optimizer in self._optimizers:
            bare_step(optimizer)
        for history, before, grad, after in zip(histories, weights, grads, self._samples(), strict=True):
            history.weight_norms.append(float(before.float().norm()))
            history.update_norms.append(float((after.float() - before.float()).norm()))
            if grad is None:
                history.grad_norms.append(math.nan)
                history.grad_rms.append(math.nan)
                history.lost.append(math.nan)
                continue
            moved, grad = grad != 0, grad.float()
            count = int(moved.sum())
            history.grad_norms.append(float(grad.norm()))
            history.grad_rms.append(float(grad.norm()) / max(count, 1) ** 0.5)
            history.lost.append(float(((after == before) & moved).sum()) / count if count else math.nan)

    def _note_overwritten(self, result: ShortTraining, weights: list[Tensor], previous: list[Tensor] | None) -> None:
        """Whether the call of step_fn changed weights itself."""
        for p, before, old in zip(self._params, weights, previous or weights, strict=True):
            now = _sample(p)
            if not torch.equal(now, before):
                name = self._names.get(id(p), "(not in the model)")
                undone = previous is not None and torch.equal(now, old)
                result.overwritten[name] = result.overwritten.get(name, False) or undone

    @torch.no_grad()
    def _samples(self) -> list[Tensor]:
        return [_sample(p).clone() for p in self._params]

    def _clear(self) -> None:
        for p in (*self._params, *self._model.parameters()):
            p.grad = None

    def mean_loss(self, batches: Sequence[Any]) -> float:
        """The mean loss of these batches, always with the same random numbers."""
        self._seeded()
        losses = [float(self._step_fn(self._model, copied(batch)).detach()) for batch in batches]
        return sum(losses) / len(losses)

    def _set_lr(self, factor: float) -> None:
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                lr = group_peak(group) * factor
                if isinstance(group["lr"], Tensor):
                    group["lr"] = torch.as_tensor(lr).to(group["lr"])
                else:
                    group["lr"] = lr


def group_peak(group: Mapping[str, Any]) -> float:
    """The highest rate a scheduler will set, as far as it left word of it; else the rate now."""
    return max(float(group.get(key, 0.0)) for key in ("lr", "initial_lr", "max_lr"))


def peak_lr(optimizers: Sequence[Optimizer]) -> float:
    return max((group_peak(group) for o in optimizers for group in o.param_groups), default=0.0)


def median(values: Sequence[float]) -> float:
    known = sorted(v for v in values if not math.isnan(v))
    return known[len(known) // 2] if known else math.nan


def _sample(tensor: Tensor) -> Tensor:
    flat = tensor.detach().reshape(-1)
    return flat[:SAMPLE]
