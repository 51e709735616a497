"""The model computes in float32, whatever autocast says around it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map


class Float32:
    """Switches autocast off inside one model, by hooks that are there only while it is asked for."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooks: list[Any] = []

    def objection(self) -> str | None:
        """Why this model cannot compute in float32, if it cannot."""
        other = {p.dtype for p in self._model.parameters() if p.is_floating_point()} - {torch.float32}
        if other:
            return f"the model cannot compute in float32: it holds weights in {', '.join(sorted(map(str, other)))}"
        if any(_mixed(module) for module in self._model.modules()):
            return "the model cannot compute in float32: FSDP hands it weights of another type"
        return None

    def switch(self, on: bool) -> None:
        """Put the hooks on the model, or take them off."""
        if on == bool(self._hooks):
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if on:
            entered: list[torch.autocast] = []
            device = next(self._model.parameters()).device.type
            enter, leave = _Enter(device, entered), _Leave(entered)
            self._hooks += [
                self._model.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
                self._model.register_forward_hook(leave, always_call=True),
            ]


class _Enter:
    """Before the forward pass; a copy of the model, saved or deep, carries an idle one."""

    def __init__(self, device: str | None = None, entered: list[torch.autocast] | None = None) -> None:
        self._device = device
        self._entered = entered

    def __call__(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._entered is None or self._device is None:
            return None
        off = torch.autocast(self._device, enabled=False)
        off.__enter__()
        self._entered.append(off)
        return tree_map(widened, args), tree_map(widened, kwargs)

    def __reduce__(self) -> tuple[type[_Enter], tuple[()]]:
        return _Enter, ()


class _Leave:
    """After the forward pass, however it ended."""

    def __init__(self, entered: list[torch.autocast] | None = None) -> None:
        self._entered = entered

    def __call__(self, *_: object) -> None:
        if self._entered:
            self._entered.pop().__exit__(None, None, None)

    def __reduce__(self) -> tuple[type[_Leave], tuple[()]]:
        return _Leave, ()


def widened(value: Any) -> Any:
    """A tensor of half precision in float32; anything else as it is."""
    return value.float() if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16) else value


def _mixed(module: nn.Module) -> bool:
    if not isinstance(module, FSDPModule):
        return False
    return module._get_fsdp_state()._mp_policy.param_dtype not in (None, torch.float32)
