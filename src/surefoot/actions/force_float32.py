"""Makes a model compute in float32 inside any autocast context."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map


class ForceFloat32:
    """Disables autocast inside one model, with hooks that are registered only while it is enabled."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._hooks: list[Any] = []

    def unsupported_reason(self) -> str | None:
        """Why this model cannot compute in float32; None if it can."""
        other_dtypes = {p.dtype for p in self._model.parameters() if p.is_floating_point()} - {torch.float32}
        if other_dtypes:
            return f"the model cannot compute in float32: it has weights in {', '.join(sorted(map(str, other_dtypes)))}"
        if any(_has_mixed_precision(module) for module in self._model.modules()):
            return "the model cannot compute in float32: FSDP casts its weights to another dtype"
        return None

    def set_enabled(self, enabled: bool) -> None:
        """Register the hooks, or remove them."""
        if enabled == bool(self._hooks):
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if enabled:
            entered: list[torch.autocast] = []
            device = next(self._model.parameters()).device.type
            enter, leave = _EnterFloat32(device, entered), _LeaveFloat32(entered)
            self._hooks += [
                self._model.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
                self._model.register_forward_hook(leave, always_call=True),
            ]


class _EnterFloat32:
    """Runs before the forward pass; a pickled or deep copy of the model gets one that does nothing."""

    def __init__(self, device: str | None = None, entered: list[torch.autocast] | None = None) -> None:
        self._device = device
        self._entered = entered

    def __call__(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._entered is None or self._device is None:
            return None
        autocast = torch.autocast(self._device, enabled=False)
        autocast.__enter__()
        self._entered.append(autocast)
        return tree_map(to_float32, args), tree_map(to_float32, kwargs)

    def __reduce__(self) -> tuple[type[_EnterFloat32], tuple[()]]:
        return _EnterFloat32, ()


class _LeaveFloat32:
    """Runs after the forward pass, even after an error."""

    def __init__(self, entered: list[torch.autocast] | None = None) -> None:
        self._entered = entered

    def __call__(self, *_: object) -> None:
        if self._entered:
            self._entered.pop().__exit__(None, None, None)

    def __reduce__(self) -> tuple[type[_LeaveFloat32], tuple[()]]:
        return _LeaveFloat32, ()


def to_float32(value: Any) -> Any:
    """A float16 or bfloat16 tensor in float32; anything else unchanged."""
    return value.float() if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16) else value


def _has_mixed_precision(module: nn.Module) -> bool:
    if not isinstance(module, FSDPModule):
        return False
    return module._get_fsdp_state()._mp_policy.param_dtype not in (None, torch.float32)
