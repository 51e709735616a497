"""What the steps are asked for: set before each step and taken off after it, so that no loop ever sees it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.actions.force_float32 import Float32
from surefoot.records import StepOverrides

FREE = StepOverrides()


class Ceilings(Protocol):
    """One optimizer's gate, as far as it can be asked for something."""

    def restrain(self, *, norm: float = math.inf, loss: float = math.inf, clip: float = math.inf) -> None: ...


class OverrideApplier:
    """Holds the restraints in force over all optimizers of a run, each its own."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], gates: Sequence[Ceilings]) -> None:
        self._asked: list[StepOverrides] = [FREE] * len(optimizers)
        self._places = list(range(len(optimizers)))
        """Where the figures of each optimizer stand in what is asked of it."""
        self._optimizers = optimizers
        self._gates = gates
        self._float32 = Float32(model)
        self._steps = [0] * len(optimizers)
        """Steps of each optimizer since the restraint was set."""
        self._peaks: dict[int, float | Tensor] = {}
        """The highest rate each loop has set under a cap: as far as it comes down from there, so does the cap."""
        self._changed: list[list[_Change]] = [[] for _ in optimizers]

    @property
    def restraint(self) -> StepOverrides:
        """What is asked of the optimizers; of the first one that is asked for anything, where they differ."""
        return next((asked for asked in self._asked if asked != FREE), FREE)

    def objection(self, restraint: StepOverrides) -> str | None:
        """Why this cannot be asked of the run, if it cannot."""
        return self._float32.objection() if restraint.float32 else None

    def set(self, restraint: StepOverrides, optimizers: Sequence[int] = ()) -> None:
        """From the next step on this is asked of these optimizers, or of all, and nothing else."""
        for place, k in enumerate(optimizers or range(len(self._optimizers))):
            if not restraint.max_lr:
                self._peaks.pop(k, None)
            self._asked[k], self._places[k], self._steps[k] = restraint, place, 0
        self._float32.switch(any(asked.float32 for asked in self._asked))
        self._restrain_gates()

    def lift(self, restraint: StepOverrides) -> bool:
        """No longer ask this of those optimizers that are asked for nothing but this; whether there was one."""
        found = [k for k, asked in enumerate(self._asked) if asked == restraint]
        if found:
            self.set(FREE, found)
        return bool(found)

    def rewire(self, gates: Sequence[Ceilings]) -> None:
        """The optimizers have other gates now."""
        self._gates = gates
        if self.restraint != FREE:
            self._restrain_gates()

    def _restrain_gates(self) -> None:
        for k, gate in enumerate(self._gates):
            asked, place = self._asked[k], self._places[k]
            gate.restrain(
                norm=_of(asked.norm_ceiling, place, math.inf),
                loss=asked.loss_ceiling,
                clip=_of(asked.clip, place, math.inf),
            )

    def before(self, k: int) -> None:
        """A step of this optimizer begins."""
        self._undo(k)  # an error may have kept the step before from its end
        asked = self._asked[k]
        if asked is FREE or asked == FREE:
            return
        groups = self._optimizers[k].param_groups
        factor = self._factor(k, groups[0].get("lr"))
        if factor is not None:
            self._change(k, "lr", lambda lr: _product(lr, factor))
        cap = _of(asked.max_momentum, self._places[k], math.inf)
        if cap < math.inf:
            self._change(k, "momentum", lambda held: _least(held, cap))
            self._change(k, "betas", lambda held: (_least(held[0], cap), *held[1:]))
        self._steps[k] += 1

    def empty(self) -> bool:
        """Gradients are left over, and backward is about to add to them: emptied, if that is asked for."""
        if not any(asked.zero_stale_grads for asked in self._asked):
            return False
        left = [p.grad for o in self._optimizers for g in o.param_groups for p in g["params"] if p.grad is not None]
        with torch.no_grad():
            for gradient in left:
                gradient.zero_()
        return True

    def after(self, k: int) -> None:
        """The step is over: everything is again what the loop has set."""
        self._undo(k)

    def release(self) -> None:
        """Let go of everything."""
        for k in range(len(self._optimizers)):
            self._undo(k)
        self._asked = [FREE] * len(self._optimizers)
        self._float32.switch(False)

    def _factor(self, k: int, first: float | Tensor | None) -> float | Tensor | None:
        """What the rates are multiplied by in this step, a tensor where the rate is one; None for nothing."""
        asked = self._asked[k]
        risen = min(1.0, (self._steps[k] + 1) / asked.rewarmup_steps) if asked.rewarmup_steps > 0 else 1.0
        factor, cap = asked.lr_factor * risen, _of(asked.max_lr, self._places[k], math.inf)
        if first is None or (factor == 1.0 and cap == math.inf):
            return None
        if cap == math.inf:
            return factor
        peak = self._peaks[k] = _higher(self._peaks.get(k, 0.0), first)
        if isinstance(first, Tensor):
            return torch.where(first.detach() > cap, cap / peak, 1.0) * factor
        return factor * (cap / float(peak) if first > cap else 1.0)

    def _change(self, k: int, key: str, how: Callable[[Any], Any]) -> None:
        for group in self._optimizers[k].param_groups:
            if group.get(key) is not None:
                change = _Change(group, key, was=group[key], made=how(group[key]))
                self._changed[k].append(change)
                group[key] = change.made

    def _undo(self, k: int) -> None:
        for change in self._changed[k]:
            change.undo()
        self._changed[k] = []


@dataclass(slots=True, eq=False)
class _Change:
    """One option of a parameter group that is another one inside the step."""

    group: dict[str, Any]
    key: str
    was: Any
    made: Any

    def undo(self) -> None:
        if self.group.get(self.key) is self.made:  # else the loop has set a new one inside the step, or loaded one
            self.group[self.key] = self.was


def _of(figures: Sequence[float], k: int, otherwise: float) -> float:
    return figures[k] if k < len(figures) else otherwise


def _higher(peak: float | Tensor, rate: float | Tensor) -> float | Tensor:
    if isinstance(rate, Tensor):
        known = peak if isinstance(peak, Tensor) else torch.full_like(rate, peak)  # `new_tensor` would wait
        return torch.maximum(known, rate.detach())
    return max(float(peak), rate)


def _product(rate: float | Tensor, factor: float | Tensor) -> float | Tensor:
    if isinstance(rate, Tensor):
        return rate.detach() * (factor.to(rate.device, non_blocking=True) if isinstance(factor, Tensor) else factor)
    return rate * float(factor)


def _least(held: float | Tensor, cap: float) -> float | Tensor:
    return torch.clamp(held, max=cap) if isinstance(held, Tensor) else min(held, cap)
