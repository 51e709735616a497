"""The numbers a model computes with, while its weights and moments stay in float32."""

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
from surefoot.train.recipe.schema import Precision as Spec

_TYPES = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_ALL_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_NORMS = {"cuda": (nn.RMSNorm,)}
"""Norms that autocast may leave in half precision: on CUDA it takes care of the others by itself."""


class Precision:
    """Computes forward passes in the recipe's type by autocast, or leaves that to a sharded model."""

    def __init__(self, spec: Spec, device: torch.device, *, sharded: bool = False) -> None:
        """With `sharded` the model is handed weights in `compute` by those who shard it, and nothing is cast here."""
        self.compute = _TYPES[spec.compute]
        self.autocasts = self.compute is not torch.float32 and not sharded
        self._spec = spec
        self._device = device.type
        _check(self.compute, device)
        _multiply(in_tf32=spec.compute == "tf32")
        self.scaler: torch.amp.GradScaler | None = None
        if self.compute is torch.float16:
            self.scaler = torch.amp.GradScaler(
                self._device, init_scale=spec.first_scale, growth_interval=spec.grow_every
            )

    def prepare(self, model: nn.Module) -> nn.Module:
        """Weights in float32, and the modules that are kept in float32 made to stay in it; before it is spread."""
        for p in model.parameters():
            p.data = to_float32(p.data)
        for buffer in model.buffers():
            buffer.data = to_float32(buffer.data)
        kept = self.kept(model)
        if self.autocasts:
            norms = [module for module in model.modules() if isinstance(module, _NORMS.get(self._device, _ALL_NORMS))]
            for module in {id(module): module for module in (*kept, *norms)}.values():
                # In place of the method: the compiler sees through it, and names in the state stay as they are.
                module.forward = functools.partial(_in_float32, self._device, module.forward)
        return model

    def kept(self, model: nn.Module) -> list[nn.Module]:
        """The outermost modules whose name or class fits a pattern of `keep_float32`."""
        found: dict[str, nn.Module] = {}
        for pattern in self._spec.keep_float32:
            fits = {
                name: module
                for name, module in model.named_modules()
                if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(type(module).__name__, pattern)
            }
            if not fits:
                raise ValueError(
                    f"precision.keep_float32: no module of the model has the name or class {pattern!r}. It has, for "
                    f"example, {', '.join(_like(pattern, model))}"
                )
            found |= fits
        inner = {id(part) for module in found.values() for part in module.modules() if part is not module}
        return [module for module in found.values() if id(module) not in inner]

    def forward(self) -> contextlib.AbstractContextManager[Any]:
        """Around forward pass and loss: products in the recipe's type; norms, softmax and losses in float32."""
        if not self.autocasts:
            return contextlib.nullcontext()
        return torch.autocast(self._device, dtype=self.compute)


def _check(compute: torch.dtype, device: torch.device) -> None:
    if device.type != "cuda" or compute is not torch.bfloat16:
        return
    if not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(
            f"precision.compute: {torch.cuda.get_device_name(device)} cannot compute in bfloat16. "
            "Use precision.compute=float16, which is scaled, or float32"
        )


def _multiply(*, in_tf32: bool) -> None:
    """Matrices and convolutions of float32 numbers, in full or in TF32."""
    with warnings.catch_warnings():  # some versions of torch call the first of these old, and have no other for it
        warnings.simplefilter("ignore")
        torch.set_float32_matmul_precision("high" if in_tf32 else "highest")
    for kind in ("conv", "rnn"):
        setattr(getattr(torch.backends.cudnn, kind), "fp32_precision", "tf32" if in_tf32 else "ieee")


def _in_float32(device: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with torch.autocast(device, enabled=False):
        return forward(*tree_map(to_float32, args), **tree_map(to_float32, kwargs))


def _like(pattern: str, model: nn.Module) -> list[str]:
    """Classes and names of modules, those most like the pattern first."""
    names = {type(module).__name__ for module in model.modules()} | {name for name, _ in model.named_modules() if name}
    return difflib.get_close_matches(pattern, sorted(names), n=4, cutoff=0.0)
