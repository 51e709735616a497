"""One optimizer's gate: refuses or clips the step that is about to run, and tidies up after it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from surefoot.gate.clip import Unit
from surefoot.gate.rule import Ceiling, Decider, GateMemory, NormRule, VerdictSlot, decider_for, memory_for
from surefoot.gate.skip_step import StepOptions
from surefoot.gate.veto import VetoMethod, step_is_compiled, veto_method_of
from surefoot.measure.layout import local
from surefoot.records import Verdict

REFRESH = 10
"""Steps between two looks at the adaptive clip threshold."""
_NAMES = ("found_inf", "grad_scale")


class Gate:
    """Decides over one optimizer's step and makes the decision hold."""

    def __init__(
        self,
        number: int,
        optimizer: Optimizer,
        *,
        units: Sequence[Unit],
        params: Sequence[Tensor],
        rule: NormRule,
        device: torch.device,
    ) -> None:
        self.optimizer = optimizer
        self.veto_method, self.why = veto_method_of(optimizer)
        self.memory: GateMemory = memory_for(number, units, device)
        self.decide: Decider = decider_for(self.memory, rule)
        self.refused: bool | None = False
        """Whether the step under way was refused; None when only the device knows."""
        self.buffers_tainted: bool | Tensor = False
        """Whether what the batch left in the buffers must go too; a tensor when only the device knows."""
        self.options = StepOptions(optimizer)
        self.units = [units[i] for i in self.memory.units]
        self._tight = False
        """Steps are asked for a clip beyond the user's own."""
        self.by_norm = any(u.clip.by_norm for u in self.units)
        """Whether gradients are clipped by norm."""
        self._clips = any(u.clip.anything for u in self.units)
        self._folds = len(self.units) == 1 and self.units[0].clip.value == float("inf")
        self._params = params
        self._steps = 0
        self._ready: tuple[bool, ...] | None = None
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._prior: dict[str, Any] | None = None
        self._copy: _Copy | None = None

    def restrain(self, *, norm: float = math.inf, loss: float = math.inf, clip: float = math.inf) -> None:
        """Ceilings for the steps from here on; infinite is none."""
        self._tight = clip < math.inf
        self.by_norm = self._tight or any(u.clip.by_norm for u in self.units)
        self._clips = self._tight or any(u.clip.anything for u in self.units)
        for place, value in ((Ceiling.NORM, norm), (Ceiling.LOSS, loss), (Ceiling.CLIP, clip)):
            self.memory.ceilings[place].fill_(value)

    def forget(self) -> None:
        """The optimizer's state is another one now."""
        self._ready = None

    def before(self) -> None:
        """A step is about to begin."""
        self.refused = False
        self.options.before()
        if self.veto_method is VetoMethod.COPY:
            self._copy = _Copy(self.optimizer)

    def apply(self, said: Tensor, present: tuple[bool, ...]) -> None:
        """Make the verdict hold for the step that is about to use the gradients."""
        if self.veto_method is VetoMethod.DEVICE and self._has_state(present) and not step_is_compiled():
            self.refused, self.buffers_tainted = None, self.memory.spoilt
            self._arm()
            return
        verdict, *_, factor = said[: VerdictSlot.CLIPPED + 1].tolist()  # the one host read of this way; free on a CPU
        self.refused = verdict != Verdict.APPLIED
        self.buffers_tainted = verdict not in (Verdict.APPLIED, Verdict.OVERFLOW)
        if self.refused:
            self.hide()
        elif self._clips:
            self._clip_in_place(getattr(self.optimizer, "grad_scale", None), by_norm=factor < 1.0)

    def hide(self) -> None:
        """Take the gradients away for the time of the step: an optimizer leaves alone what has none."""
        for p in self._own():
            if p.grad is not None:
                self._hidden.append((p, p.grad))
                p.grad = None

    def refresh(self) -> None:
        """Look at the adaptive threshold anew every few steps."""
        if self._steps % REFRESH == 0:
            self.memory.refresh()
        self._steps += 1

    def after(self, *, spoilt: bool = False) -> None:
        """Put back whatever the step was not to see, and the step itself if its search has `spoilt` a buffer."""
        for p, gradient in self._hidden:
            if p.grad is None:
                p.grad = gradient
        self._hidden.clear()
        if self._prior is not None:
            for name in _NAMES:
                if name in self._prior:
                    setattr(self.optimizer, name, self._prior[name])
                elif hasattr(self.optimizer, name):
                    delattr(self.optimizer, name)
            self._prior = None
        if self._copy is not None:
            spoilt = spoilt or not all(bool(p.isfinite().all()) for p in self._own())
            if self.refused or spoilt:
                self._copy.restore()
            self.buffers_tainted = bool(self.refused) or spoilt
            self.refused = self.buffers_tainted
            self._copy = None
        if self.refused:
            self.options.restore()
        else:
            self.options.after()

    def _own(self) -> Iterator[Tensor]:
        return (p for group in self.optimizer.param_groups for p in group["params"])

    def _has_state(self, present: tuple[bool, ...]) -> bool:
        """Whether every parameter with a gradient has been stepped before: a first step writes state of its own."""
        if present == self._ready:
            return True
        if all(p.grad is None or self.optimizer.state.get(p) for p in self._own()) or not self._keeps_state():
            self._ready = present
            return True
        return False

    def _keeps_state(self) -> bool:
        return any(group.get("momentum", 1.0) for group in self.optimizer.param_groups)

    def _arm(self) -> None:
        """Set what a fused step reads, on top of what a GradScaler may have set."""
        held = {name: getattr(self.optimizer, name) for name in _NAMES if hasattr(self.optimizer, name)}
        self._prior = held
        found, scale = held.get("found_inf"), held.get("grad_scale")
        refuse, divisor = self.memory.refuse, self.memory.divisor
        setattr(
            self.optimizer, "found_inf", refuse if found is None else torch.maximum(refuse, found.to(refuse.device))
        )
        if not self._clips:
            return
        if self._folds:
            setattr(self.optimizer, "grad_scale", divisor if scale is None else divisor * scale.to(divisor.device))
        else:
            self._clip_in_place(scale, by_norm=True)

    def _clip_in_place(self, scale: Tensor | None, *, by_norm: bool) -> None:
        for unit, factor in zip(self.units, self.memory.factors, strict=True):
            found = [local(p.grad) for p in self._params[unit.span] if p.grad is not None]
            if by_norm and (self._tight or unit.clip.by_norm) and found:
                _multiply(found, factor)
            if unit.clip.value < float("inf"):
                for g in found:
                    bound = torch.full((), unit.clip.value, device=g.device)
                    bound = bound if scale is None else bound * scale.to(g.device)
                    g.clamp_(-bound, bound)


def _multiply(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply all by one number, in a single launch where they lie together."""
    plain = [t for t in tensors if not t.is_sparse and t.device == factor.device]
    if plain:
        torch._foreach_mul_(plain, factor)
    for t in tensors:
        if t.is_sparse or t.device != factor.device:
            t.mul_(factor.to(t.device))


class _Copy:
    """Weights and state of an optimizer as they were before a step."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._weights = [(p, p.detach().clone()) for group in optimizer.param_groups for p in group["params"]]
        self._state = {p: {k: _kept(v) for k, v in held.items()} for p, held in optimizer.state.items()}

    def restore(self) -> None:
        with torch.no_grad():
            for p, was in self._weights:
                p.copy_(was)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)


def _kept(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value
