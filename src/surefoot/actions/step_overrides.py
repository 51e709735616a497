"""Applies step overrides (lower lr, tighter clip, ...) before each step and undoes them after, unseen by the loop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surefoot.actions.force_float32 import ForceFloat32
from surefoot.records import StepOverrides

NO_OVERRIDES = StepOverrides()


class CeilingSetter(Protocol):
    """The part of a gate that overrides use."""

    def set_ceilings(self, *, norm: float = math.inf, loss: float = math.inf, clip: float = math.inf) -> None: ...


class OverrideApplier:
    """Holds the active overrides of each optimizer and applies them to its steps."""

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], gates: Sequence[CeilingSetter]) -> None:
        self.in_force = False
        """Whether steps need `before_step` and `after_step`; most runs never do."""
        self._overrides: list[StepOverrides] = [NO_OVERRIDES] * len(optimizers)
        self._indices = list(range(len(optimizers)))
        """Index of each optimizer's numbers in the tuples of its overrides."""
        self._optimizers = optimizers
        self._gates = gates
        self._float32 = ForceFloat32(model)
        self._steps = [0] * len(optimizers)
        """Steps of each optimizer since its overrides were set."""
        self._max_lrs_seen: dict[int, float | Tensor] = {}
        """The highest lr the loop has set while a cap is active: the cap decays with the lr from there."""
        self._changed: list[list[_Change]] = [[] for _ in optimizers]

    @property
    def active(self) -> StepOverrides:
        """The active overrides; where optimizers differ, those of the first optimizer that has any."""
        return next((overrides for overrides in self._overrides if overrides != NO_OVERRIDES), NO_OVERRIDES)

    def unsupported_reason(self, overrides: StepOverrides) -> str | None:
        """Why these overrides cannot be applied to the run; None if they can."""
        return self._float32.unsupported_reason() if overrides.float32 else None

    def set(self, overrides: StepOverrides, optimizers: Sequence[int] = ()) -> None:
        """Replace the overrides of these optimizers, or of all, from the next step on."""
        for index, k in enumerate(optimizers or range(len(self._optimizers))):
            if not overrides.max_lr:
                self._max_lrs_seen.pop(k, None)
            self._overrides[k], self._indices[k], self._steps[k] = overrides, index, 0
        # Changes of a step that ended in an error are still to be undone.
        self.in_force = any(overrides != NO_OVERRIDES for overrides in self._overrides) or any(self._changed)
        self._float32.set_enabled(any(overrides.float32 for overrides in self._overrides))
        self._set_gate_ceilings()

    def lift(self, overrides: StepOverrides) -> bool:
        """Remove these overrides from the optimizers that have exactly these; returns whether there was one."""
        optimizers = [k for k, active in enumerate(self._overrides) if active == overrides]
        if optimizers:
            self.set(NO_OVERRIDES, optimizers)
        return bool(optimizers)

    def replace_gates(self, gates: Sequence[CeilingSetter]) -> None:
        """Set the ceilings on new gates of the same optimizers."""
        self._gates = gates
        if self.active != NO_OVERRIDES:
            self._set_gate_ceilings()

    def _set_gate_ceilings(self) -> None:
        for k, gate in enumerate(self._gates):
            overrides, index = self._overrides[k], self._indices[k]
            gate.set_ceilings(
                norm=_value_at(overrides.norm_ceiling, index, math.inf),
                loss=overrides.loss_ceiling,
                clip=_value_at(overrides.clip, index, math.inf),
            )

    def before_step(self, k: int) -> None:
        """Apply the overrides to a step of this optimizer that is about to begin."""
        self._undo(k)  # the last step may have ended in an error
        overrides = self._overrides[k]
        if overrides == NO_OVERRIDES:
            return
        groups = self._optimizers[k].param_groups
        factor = self._lr_factor(k, groups[0].get("lr"))
        if factor is not None:
            self._change(k, "lr", lambda lr: _scaled(lr, factor))
        cap = _value_at(overrides.max_momentum, self._indices[k], math.inf)
        if cap < math.inf:
            self._change(k, "momentum", lambda value: _capped(value, cap))
            self._change(k, "betas", lambda value: (_capped(value[0], cap), *value[1:]))
        self._steps[k] += 1

    def zero_stale_grads(self, *, stale: bool) -> bool:
        """Zero the gradients that backward is about to add to, if an override says so; returns whether it did. `stale`
        are those of the last update, unchanged."""
        if not any(o.zero_all_grads or (stale and o.zero_stale_grads) for o in self._overrides):
            return False
        grads = [p.grad for o in self._optimizers for g in o.param_groups for p in g["params"] if p.grad is not None]
        with torch.no_grad():
            for grad in grads:
                grad.zero_()
        return True

    def after_step(self, k: int) -> None:
        """Restore what the loop has set."""
        self._undo(k)

    def release(self) -> None:
        """Undo all changes and remove all overrides."""
        for k in range(len(self._optimizers)):
            self._undo(k)
        self._overrides = [NO_OVERRIDES] * len(self._optimizers)
        self.in_force = False
        self._float32.set_enabled(False)

    def _lr_factor(self, k: int, lr: float | Tensor | None) -> float | Tensor | None:
        """Factor on the lr in this step, a tensor if the lr is one; None if it is not changed."""
        overrides = self._overrides[k]
        warmup = min(1.0, (self._steps[k] + 1) / overrides.rewarmup_steps) if overrides.rewarmup_steps > 0 else 1.0
        lasting, cap = overrides.lasting_lr_factor, _value_at(overrides.max_lr, self._indices[k], math.inf)
        factor = overrides.lr_factor * lasting * warmup
        if lr is None or (factor == 1.0 and cap == math.inf):
            return None
        if cap == math.inf:
            return factor
        lr = lr * lasting  # the cap is on what the lasting factor leaves of it
        max_lr = self._max_lrs_seen[k] = _max_of(self._max_lrs_seen.get(k, 0.0), lr)
        if isinstance(lr, Tensor):
            return torch.where(lr.detach() > cap, cap / max_lr, 1.0) * factor
        return factor * (cap / float(max_lr) if lr > cap else 1.0)

    def _change(self, k: int, key: str, change_value: Callable[[Any], Any]) -> None:
        for group in self._optimizers[k].param_groups:
            if group.get(key) is not None:
                change = _Change(group, key, before=group[key], during=change_value(group[key]))
                self._changed[k].append(change)
                group[key] = change.during

    def _undo(self, k: int) -> None:
        for change in self._changed[k]:
            change.undo()
        self._changed[k] = []


@dataclass(slots=True, eq=False)
class _Change:
    """One option of a parameter group that is changed during a step."""

    group: dict[str, Any]
    key: str
    before: Any
    during: Any

    def undo(self) -> None:
        if self.group.get(self.key) is self.during:  # else the loop has set or loaded a new value during the step
            self.group[self.key] = self.before


def _value_at(values: Sequence[float], k: int, default: float) -> float:
    return values[k] if k < len(values) else default


def _max_of(max_lr: float | Tensor, lr: float | Tensor) -> float | Tensor:
    if isinstance(lr, Tensor):
        # `new_tensor` would wait for the device.
        known = max_lr if isinstance(max_lr, Tensor) else torch.full_like(lr, max_lr)
        return torch.maximum(known, lr.detach())
    return max(float(max_lr), lr)


def _scaled(lr: float | Tensor, factor: float | Tensor) -> float | Tensor:
    if isinstance(lr, Tensor):
        return lr.detach() * (factor.to(lr.device, non_blocking=True) if isinstance(factor, Tensor) else factor)
    return lr * float(factor)


def _capped(value: float | Tensor, cap: float) -> float | Tensor:
    return torch.clamp(value, max=cap) if isinstance(value, Tensor) else min(value, cap)
