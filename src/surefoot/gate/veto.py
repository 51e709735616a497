"""How an update is refused: the method each optimizer supports, a `step` that can be skipped, and undoing its options.

A step that is refused before it begins does not run at all, as when a GradScaler skips one: an optimizer that finds no
gradients still counts the step, may change weights in other ways, or raises an error.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from enum import StrEnum
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class VetoMethod(StrEnum):
    """How an update of this optimizer is refused."""

    DEVICE = "device"
    """The fused step reads the refusal on the device; the host never waits."""
    HOST = "host"
    """The host reads the verdict before the step and skips a refused one."""
    COPY = "copy"
    """The step evaluates the loss while it moves the weights; they are copied before and restored after."""


FUSED_CLASSES = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
"""Classes whose fused step reads `found_inf` and `grad_scale`; not their subclasses, which may override the step."""

_WRAPPERS = {"AcceleratedOptimizer": "optimizer", "LightningOptimizer": "optimizer", "_FabricOptimizer": "optimizer"}
"""Optimizer wrappers of other trainers, and the attribute that holds the torch optimizer."""
_PLAIN = (int, float, bool, str, type(None))


def unwrap_optimizer(optimizer: object) -> Optimizer:
    """The torch optimizer inside the wrappers that trainers put around it."""
    while inner := [_WRAPPERS[kind.__name__] for kind in type(optimizer).__mro__ if kind.__name__ in _WRAPPERS]:
        optimizer = getattr(optimizer, inner[0])
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"attach: {type(optimizer).__name__} is not a torch.optim.Optimizer, so its step cannot be guarded. Pass "
            "the torch optimizer it wraps, or derive it from torch.optim.Optimizer."
        )
    return optimizer


def veto_method_of(optimizer: Optimizer) -> tuple[VetoMethod, str]:
    """The veto method of this optimizer, and a sentence that says why."""
    name = type(optimizer).__name__
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if any(hasattr(p, "_in_backward_optimizers") for p in params):
        raise ValueError(
            f"attach: {name} steps inside backward (optimizer-in-backward), so updates are applied before all "
            "gradients are known. Step after backward, or leave this model unguarded."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        return VetoMethod.COPY, f"{name} moves the weights during its line search: they are copied before each step"
    fused = [bool(group.get("fused")) for group in optimizer.param_groups]
    if type(optimizer) in FUSED_CLASSES and all(fused):
        return VetoMethod.DEVICE, f"{name} is fused: vetoes stay on the device"
    if not on_accelerator(params):
        return VetoMethod.HOST, f"{name} runs on the CPU: reading the verdict on the host is free"
    if type(optimizer) in FUSED_CLASSES:
        reason = "some groups are not fused" if any(fused) else "it is not fused"
        return (
            VetoMethod.HOST,
            f"one host read a step for {name}, because {reason}: pass fused=True to avoid it",
        )
    return VetoMethod.HOST, f"one host read a step: {name} cannot refuse an update on the device"


def has_fused_form(optimizer: Optimizer) -> bool:
    """Whether its class has a fused form that avoids the host read."""
    return type(optimizer) in FUSED_CLASSES


def on_accelerator(params: Iterable[torch.Tensor]) -> bool:
    """Whether reading a value of these parameters waits for a device."""
    return any(p.device.type != "cpu" for p in params)


def step_is_compiled() -> bool:
    """Whether the step that is running was compiled: such a step ignores what a hook sets on the optimizer."""
    frames = 0
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith("eval_frame.py"):
            frames += 1  # one is the guard's own hook, which is excluded from compilation
            if frames > 1:
                return True
        frame = frame.f_back
    return False


class StepRefused(BaseException):
    """Raised to leave an optimizer's step; `SkippableStep` always catches it."""

    def __init__(self, optimizer: Optimizer, result: Any = None) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.result = result


class SkippableStep:
    """Wraps `step` of one optimizer so that raising `StepRefused` in it skips the rest."""

    def __init__(self, optimizer: Optimizer, on_refused: Callable[[], None]) -> None:
        self._optimizer = optimizer
        self._depth = 0
        inner = optimizer.step
        previous = vars(optimizer).get("step")
        function = getattr(inner, "__func__", inner)  # carries the attribute by which a scheduler knows its own wrapper

        @functools.wraps(function)
        def step(_: Optimizer, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return inner(*args, **kwargs)
            self._depth += 1
            try:
                return inner(*args, **kwargs)
            except StepRefused as refusal:
                if refusal.optimizer is not optimizer:
                    raise
                on_refused()
                return refusal.result
            finally:
                self._depth -= 1

        self._previous = previous
        self._wrapper = MethodType(step, optimizer)
        optimizer.step = self._wrapper

    @property
    def active(self) -> bool:
        """Whether the running step was called through this wrapper; a `step` bound before `attach` is not."""
        return self._depth > 0

    def close(self) -> None:
        """Remove the wrapper; if others have wrapped it since, it stays and has no effect."""
        if vars(self._optimizer).get("step") is self._wrapper:
            if self._previous is None:
                del self._optimizer.step
            else:
                self._optimizer.step = self._previous


class StepOptions:
    """Parameter group options and plain attributes that an optimizer's own step changes, such as a step counter."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.moving: set[str] = set()
        """Options that a step was seen to change."""
        self.attributes: set[str] = set()
        """Attributes that a step was seen to change."""
        self._groups: list[tuple[dict[str, Any], dict[str, Any], dict[str, int]]] = []
        """Each group, its options before the step, and the versions of those that are tensors."""
        self._plain: dict[str, Any] = {}

    def before_step(self) -> None:
        """Remember the options before a step."""
        self._groups, self._plain = [], {}
        for group in self._optimizer.param_groups:
            options, versions = dict(group), {}
            for name, value in group.items():
                if type(value) is list:
                    options[name] = list(value)
                elif isinstance(value, Tensor):
                    versions[name] = value._version
            self._groups.append((group, options, versions))
        for name, value in vars(self._optimizer).items():
            if type(value) in _PLAIN:
                self._plain[name] = value

    def after_step(self) -> None:
        """Learn which options a step that was not refused has changed."""
        for group, before, versions in self._groups:
            for name, value in group.items():
                earlier = before.get(name, self)
                if name == "params" or (value is earlier and name not in versions):
                    continue
                if _differs(earlier, value, versions.get(name)):
                    self.moving.add(name)
            if "initial_lr" in group:  # set by a scheduler, which may have stepped in a hook
                self.moving.discard("lr")
        now = vars(self._optimizer)
        for name, value in self._plain.items():
            if name in now and type(now[name]) in _PLAIN and now[name] != value:
                self.attributes.add(name)
        self._groups, self._plain = [], {}

    def restore(self) -> None:
        """Undo a refused step's changes to options and attributes, except writes into tensors."""
        for group, before, _ in self._groups:
            for name in [name for name in group if name not in before]:
                del group[name]
            group.update({name: value for name, value in before.items() if name != "params"})
        for name, value in self._plain.items():
            if type(getattr(self._optimizer, name, None)) in _PLAIN and getattr(self._optimizer, name) != value:
                setattr(self._optimizer, name, value)
        self._groups, self._plain = [], {}


def _differs(before: Any, now: Any, version: int | None) -> bool:
    if before is now:
        return isinstance(now, Tensor) and now._version != version
    if isinstance(before, Tensor) or isinstance(now, Tensor):
        return True
    try:
        return bool(before != now)
    except (RuntimeError, ValueError):  # a container of tensors
        return False
