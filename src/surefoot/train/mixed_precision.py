"""Mixed precision: the type a model computes in, while its weights and moments stay in float32."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from surefoot.actions.force_float32 import to_float32
from surefoot.train.recipe.schema import PrecisionSection

_DTYPES = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_ALL_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_NORMS = {"cuda": (nn.RMSNorm,)}
"""Norms to run in float32 explicitly, by device; CUDA autocast already does so for the others."""


class Precision:
    """Runs forward passes in the recipe's type by autocast; a sharded model casts by itself."""

    def __init__(self, spec: PrecisionSection, device: torch.device, *, sharded: bool = False) -> None:
        """With `sharded`, FSDP hands the model weights in `compute`, and nothing is cast here."""
        self.compute = _DTYPES[spec.compute]
        self.autocasts = self.compute is not torch.float32 and not sharded
        self._spec = spec
        self._device = device.type
        _check_supported(self.compute, device)
        _allow_tf32(spec.compute == "tf32")
        self.scaler: torch.amp.GradScaler | None = None
        if self.compute is torch.float16:
            self.scaler = torch.amp.GradScaler(
                self._device, init_scale=spec.init_scale, growth_interval=spec.growth_interval
            )

    def prepare(self, model: nn.Module) -> nn.Module:
        """Cast weights and buffers to float32, and make float32 modules ignore autocast; call it before sharding."""
        for p in model.parameters():
            p.data = to_float32(p.data)
        for buffer in model.buffers():
            buffer.data = to_float32(buffer.data)
        float32_modules = self.float32_modules(model)
        if self.autocasts:
            norms = [module for module in model.modules() if isinstance(module, _NORMS.get(self._device, _ALL_NORMS))]
            for module in {id(module): module for module in (*float32_modules, *norms)}.values():
                # Replaces the method, not the module: torch.compile traces it, and state_dict names stay the same.
                module.forward = functools.partial(_in_float32, self._device, module.forward)
        return model

    def float32_modules(self, model: nn.Module) -> list[nn.Module]:
        """The outermost modules whose name or class matches a pattern in `keep_float32`."""
        matched: dict[str, nn.Module] = {}
        for pattern in self._spec.keep_float32:
            matches = {
                name: module
                for name, module in model.named_modules()
                if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(type(module).__name__, pattern)
            }
            if not matches:
                raise ValueError(
                    f"precision.keep_float32: no module of the model has the name or class {pattern!r}. It has, for "
                    f"example, {', '.join(_most_similar(pattern, model))}"
                )
            matched |= matches
        inner = {id(part) for module in matched.values() for part in module.modules() if part is not module}
        return [module for module in matched.values() if id(module) not in inner]

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        """Enclose forward pass and loss: products run in the recipe's type; norms, softmax and losses in float32."""
        if not self.autocasts:
            return contextlib.nullcontext()
        return torch.autocast(self._device, dtype=self.compute)


def _check_supported(compute: torch.dtype, device: torch.device) -> None:
    if device.type != "cuda" or compute is not torch.bfloat16:
        return
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(
            f"precision.compute: {torch.cuda.get_device_name(device)} cannot compute in bfloat16. "
            "Use precision.compute=float16, which scales the loss, or float32"
        )


def _allow_tf32(allow: bool) -> None:
    """Let float32 matrix products and convolutions use TF32, or not."""
    with warnings.catch_warnings():  # some torch versions deprecate the first call without offering another
        warnings.simplefilter("ignore")
        torch.set_float32_matmul_precision("high" if allow else "highest")
    for kind in ("conv", "rnn"):
        setattr(getattr(torch.backends.cudnn, kind), "fp32_precision", "tf32" if allow else "ieee")


def _in_float32(device: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(device, enabled=False):
        return forward(*tree_map(to_float32, args), **tree_map(to_float32, kwargs))


def _most_similar(pattern: str, model: nn.Module) -> list[str]:
    """Module classes and names, most similar to the pattern first."""
    names = {type(module).__name__ for module in model.modules()} | {name for name, _ in model.named_modules() if name}
    return difflib.get_close_matches(pattern, sorted(names), n=4, cutoff=0.0)
