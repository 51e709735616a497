"""Which weights of a model are which to an optimizer."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def trained(model: nn.Module) -> list[nn.Parameter]:
    """All that is not frozen, tied weights once; refused where there is none, or moments would not be float32."""
    found = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not found:
        raise ValueError("model: it has no weights to train, or all are frozen. Pass a model with weights to train")
    for name, p in found:
        if p.dtype in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"model: the weights {name} are {str(p.dtype).removeprefix('torch.')}, and an optimizer's moments "
                "would be too. Keep weights in float32, and compute in another type by precision.compute"
            )
    return [p for _, p in found]


def undecayed(model: nn.Module) -> set[int]:
    """Vectors and scalars, biases, and all that belongs to a norm, whatever its shape; by id."""
    found = {id(p) for name, p in model.named_parameters() if p.ndim < 2 or name.rpartition(".")[2].endswith("bias")}
    for module in model.modules():
        if "norm" in type(module).__name__.lower():
            found |= {id(p) for p in module.parameters(recurse=False)}
    return found


def hidden_matrices(model: nn.Module) -> set[int]:
    """Matrices between an embedding and the output, which has a row for each token as well; by id."""
    embedded = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    rows = {weight.shape[0] for weight in embedded}
    others = undecayed(model) | {id(weight) for weight in embedded}
    return {id(p) for p in model.parameters() if p.ndim == 2 and id(p) not in others and p.shape[0] not in rows}


def sharded(params: Iterable[Tensor]) -> bool:
    """Whether the weights are shards, of which each process holds a part."""
    return any(isinstance(p, DTensor) for p in params)
