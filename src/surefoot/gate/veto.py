"""Which way each optimizer can be made to refuse an update; told once, at attach."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from enum import StrEnum

import torch
from torch.optim import Optimizer


class VetoMethod(StrEnum):
    """How a refusal reaches an optimizer."""

    DEVICE = "device"
    """A fused step reads the refusal on the device; the host never waits."""
    HOST = "host"
    """The host reads the verdict before the step, and a refused step finds no gradients."""
    COPY = "copy"
    """The step moves weights while it looks for a way; it is copied before and put back after."""


FUSED = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
"""Classes whose fused step reads `found_inf` and `grad_scale`; a subclass may have a step of its own."""

_WRAPPERS = {"AcceleratedOptimizer": "optimizer", "LightningOptimizer": "optimizer", "_FabricOptimizer": "optimizer"}
"""Wrappers of other trainers, and the attribute that holds the real optimizer."""


def unwrap(optimizer: object) -> Optimizer:
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
    """The way this optimizer is refused, and a sentence that says why."""
    name = type(optimizer).__name__
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if any(hasattr(p, "_in_backward_optimizers") for p in params):
        raise ValueError(
            f"attach: {name} steps inside backward (optimizer-in-backward): an update has landed before the gradients "
            "are known. Step after backward, or leave this model unguarded."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        return VetoMethod.COPY, f"{name} moves the weights while it searches: they are copied before each step"
    fused = [bool(group.get("fused")) for group in optimizer.param_groups]
    if type(optimizer) in FUSED and all(fused):
        return VetoMethod.DEVICE, f"{name} is fused: refusals stay on the device"
    if not on_accelerator(params):
        return VetoMethod.HOST, f"{name} runs on the CPU: the verdict is read on the host, for free"
    if type(optimizer) in FUSED:
        how = "some groups are not fused" if any(fused) else "it is not fused"
        return (
            VetoMethod.HOST,
            f"one host read a step for {name}, because {how}: pass fused=True to all of it to lose that",
        )
    return VetoMethod.HOST, f"one host read a step: {name} cannot be told on the device to refuse an update"


def could_be_fused(optimizer: Optimizer) -> bool:
    """Whether its class has a fused form that would spare the host read."""
    return type(optimizer) in FUSED


def on_accelerator(params: Iterable[torch.Tensor]) -> bool:
    """Whether reading a value of these parameters means waiting for a device."""
    return any(p.device.type != "cpu" for p in params)


def step_is_compiled() -> bool:
    """Whether the step that is running now was compiled: such a step ignores what a hook sets on the optimizer."""
    frames = 0
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith("eval_frame.py"):
            frames += 1  # one is the guard's own hook, which the compiler is told to leave alone
            if frames > 1:
                return True
        frame = frame.f_back
    return False
