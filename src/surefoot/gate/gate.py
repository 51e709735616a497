"""One optimizer's gate: refuses or clips the step that is about to run, and restores its inputs afterwards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from surefoot.gate.clip import ClipUnit
from surefoot.gate.rule import Ceiling, Decider, GateMemory, NormRule, make_decider, new_gate_memory
from surefoot.gate.veto import StepOptions, VetoMethod, step_is_compiled, veto_method_of
from surefoot.measure.block_layout import VerdictSlot
from surefoot.measure.layout import to_local
from surefoot.records import Verdict

REFRESH_EVERY = 10
"""Steps between updates of the adaptive clip thresholds."""
_FUSED_INPUTS = ("found_inf", "grad_scale")
"""Attributes that a fused step reads from its optimizer."""


class Gate:
    """Decides on one optimizer's step and enforces the decision."""

    def __init__(
        self,
        index: int,
        optimizer: Optimizer,
        *,
        units: Sequence[ClipUnit],
        params: Sequence[Tensor],
        rule: NormRule,
        device: torch.device,
    ) -> None:
        self.optimizer = optimizer
        self.veto_method, self.veto_reason = veto_method_of(optimizer)
        self.memory: GateMemory = new_gate_memory(index, units, device)
        self.decide: Decider = make_decider(self.memory, rule)
        self.refused: bool | None = False
        """Whether the current step was refused; None when only the device knows."""
        self.buffers_tainted: bool | Tensor = False
        """Whether the buffers must be restored too; a tensor when only the device knows."""
        self.options = StepOptions(optimizer)
        self.units = [units[i] for i in self.memory.units]
        self._clip_ceiling_set = False
        """Whether an override sets a clip threshold on top of the user's own."""
        self.clips_by_norm = any(u.clip.by_norm for u in self.units)
        """Whether gradients are clipped by norm in this step."""
        self._clip_enabled = any(u.clip.enabled for u in self.units)
        self._clip_in_step = len(self.units) == 1 and self.units[0].clip.value == float("inf")
        """Whether a fused step can clip by itself: one factor for all gradients."""
        self._adaptive = any(u.clip.adaptive for u in self.units)
        self._params = params
        self._steps = 0
        self._stepped_with: tuple[bool, ...] | None = None
        """The set of present gradients for which every parameter is known to have optimizer state."""
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._saved_inputs: dict[str, Any] | None = None
        self._backup: _StepBackup | None = None

    def set_ceilings(self, *, norm: float = math.inf, loss: float = math.inf, clip: float = math.inf) -> None:
        """Set ceilings for the steps from now on; infinite is none."""
        self._clip_ceiling_set = clip < math.inf
        self.clips_by_norm = self._clip_ceiling_set or any(u.clip.by_norm for u in self.units)
        self._clip_enabled = self._clip_ceiling_set or any(u.clip.enabled for u in self.units)
        for index, value in ((Ceiling.NORM, norm), (Ceiling.LOSS, loss), (Ceiling.CLIP, clip)):
            self.memory.ceilings[index].fill_(value)

    def optimizer_state_replaced(self) -> None:
        """Note that the optimizer's state was replaced: its parameters may have no state."""
        self._stepped_with = None

    def before_step(self) -> None:
        """Prepare for a step that is about to begin."""
        self.refused = False
        self.options.before_step()
        if self.veto_method is VetoMethod.COPY:
            self._backup = _StepBackup(self.optimizer)

    def apply(self, decision: Tensor, present: tuple[bool, ...]) -> None:
        """Enforce the decision (see `VerdictSlot`) on the step that is about to use the gradients."""
        if self.veto_method is VetoMethod.DEVICE and self._has_state(present) and not step_is_compiled():
            self.refused, self.buffers_tainted = None, self.memory.buffers_tainted
            self._set_fused_inputs()
            return
        # The one host read of a step; free on a CPU.
        verdict, *_, factor = decision[: VerdictSlot.CLIP_FACTOR + 1].tolist()
        self.refused = verdict != Verdict.APPLIED
        self.buffers_tainted = verdict not in (Verdict.APPLIED, Verdict.OVERFLOW)
        if self.refused:
            self.hide_grads()
        elif self._clip_enabled:
            self._clip_in_place(getattr(self.optimizer, "grad_scale", None), by_norm=factor < 1.0)

    def hide_grads(self) -> None:
        """Remove the gradients for this step: an optimizer skips parameters without one."""
        for p in self._optimizer_params():
            if p.grad is not None:
                self._hidden.append((p, p.grad))
                p.grad = None

    def after_step(self, *, buffers_tainted: bool = False) -> None:
        """Restore what was hidden from the step; undo a COPY step that was refused or left non-finite values."""
        for p, grad in self._hidden:
            if p.grad is None:
                p.grad = grad
        self._hidden.clear()
        if self._saved_inputs is not None:
            for name in _FUSED_INPUTS:
                if name in self._saved_inputs:
                    setattr(self.optimizer, name, self._saved_inputs[name])
                elif hasattr(self.optimizer, name):
                    delattr(self.optimizer, name)
            self._saved_inputs = None
        if self._backup is not None:
            bad = buffers_tainted or not all(bool(p.isfinite().all()) for p in self._optimizer_params())
            if self.refused or bad:
                self._backup.restore()
            self.buffers_tainted = self.refused = bool(self.refused) or bad
            self._backup = None
        if self.refused:
            self.options.restore()
        else:
            self.options.after_step()
        if self._adaptive and self._steps % REFRESH_EVERY == 0:
            self.memory.refresh_thresholds()
        self._steps += 1

    def _optimizer_params(self) -> Iterator[Tensor]:
        return (p for group in self.optimizer.param_groups for p in group["params"])

    def _has_state(self, present: tuple[bool, ...]) -> bool:
        """Whether every parameter with a gradient has state: a first step initialises it even when it is refused."""
        if present == self._stepped_with:
            return True
        complete = all(p.grad is None or self.optimizer.state.get(p) for p in self._optimizer_params())
        if complete or not self._keeps_state():
            self._stepped_with = present
            return True
        return False

    def _keeps_state(self) -> bool:
        return any(group.get("momentum", 1.0) for group in self.optimizer.param_groups)

    def _set_fused_inputs(self) -> None:
        """Set the inputs of a fused step, combined with those a GradScaler may have set."""
        inputs = {name: getattr(self.optimizer, name) for name in _FUSED_INPUTS if hasattr(self.optimizer, name)}
        self._saved_inputs = inputs
        found_inf, scale = inputs.get("found_inf"), inputs.get("grad_scale")
        refuse, divisor = self.memory.refuse, self.memory.divisor
        if found_inf is not None:
            refuse = torch.maximum(refuse, found_inf.to(refuse.device))
        setattr(self.optimizer, "found_inf", refuse)
        if not self._clip_enabled:
            return
        if self._clip_in_step:
            setattr(self.optimizer, "grad_scale", divisor if scale is None else divisor * scale.to(divisor.device))
        else:
            self._clip_in_place(scale, by_norm=True)

    def _clip_in_place(self, scale: Tensor | None, *, by_norm: bool) -> None:
        for unit, factor in zip(self.units, self.memory.factors, strict=True):
            grads = [to_local(p.grad) for p in self._params[unit.span] if p.grad is not None]
            if by_norm and (self._clip_ceiling_set or unit.clip.by_norm) and grads:
                _multiply(grads, factor)
            if unit.clip.value < float("inf"):
                for g in grads:
                    bound = torch.full((), unit.clip.value, device=g.device)
                    bound = bound if scale is None else bound * scale.to(g.device)
                    g.clamp_(-bound, bound)


def _multiply(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all by one factor, in a single launch for those on its device."""
    together = [t for t in tensors if not t.is_sparse and t.device == factor.device]
    if together:
        torch._foreach_mul_(together, factor)
    for t in tensors:
        if t.is_sparse or t.device != factor.device:
            t.mul_(factor.to(t.device))


class _StepBackup:
    """Copies of an optimizer's weights and state from before a step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._weights = [(p, p.detach().clone()) for group in optimizer.param_groups for p in group["params"]]
        self._state = {p: {k: _clone(v) for k, v in state.items()} for p, state in optimizer.state.items()}

    def restore(self) -> None:
        with torch.no_grad():
            for p, before in self._weights:
                p.copy_(before)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)


def _clone(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value
