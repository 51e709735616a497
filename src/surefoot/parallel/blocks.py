"""What a model is made of, as far as spreading it is concerned: its repeated blocks, and the model inside wrappers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def bare(model: Any) -> nn.Module:
    """The model itself, without what the compiler or data parallel put around it."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules in the model's outermost `ModuleList`s whose weights nothing else uses; none if there is no such."""
    found = list(_listed(bare(model)))
    uses = Counter(id(p) for module in bare(model).modules() for p in module.parameters(recurse=False))
    return [block for block in found if _alone(block, uses)]


def _listed(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield child
        else:
            yield from _listed(child)


def _alone(block: nn.Module, uses: Counter[int]) -> bool:
    inside = Counter(id(p) for module in block.modules() for p in module.parameters(recurse=False))
    return bool(inside) and all(uses[key] == count for key, count in inside.items())
