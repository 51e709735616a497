"""What a model is made of, as far as spreading it is concerned: its repeated blocks, and the model inside wrappers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def unwrap_model(model: Any) -> nn.Module:
    """The model itself, without what the compiler or data parallel put around it."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules in the model's outermost `ModuleList`s whose weights nothing else uses; none if there is no such."""
    model = unwrap_model(model)
    return [block for block in _listed(model) if owns_weights(block, model)]


def owns_weights(block: nn.Module, model: nn.Module) -> bool:
    """Whether the block has weights, and nothing else in the model uses them."""
    inside, uses = _uses(block), _uses(model)
    return bool(inside) and all(uses[key] == count for key, count in inside.items())


def last_weighted_module(model: nn.Module) -> nn.Module | None:
    """The module that a model ends with, going by the order in which its parts were made."""
    found = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    return found[-1] if found else None


def _listed(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield child
        else:
            yield from _listed(child)


def _uses(model: nn.Module) -> Counter[int]:
    return Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
