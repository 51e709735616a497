"""A model spread over the processes: whole copies, or shards of its optimizer, gradients and weights.

With the compiler: whole copies (data, zero1) are compiled after they were spread, so that torch splits the graph where
the exchange of gradients begins; shards (zero2, zero3) are compiled block by block before, with `block.compile()`, so
that weights are gathered between the compiled parts.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from surefoot.parallel.blocks import find_blocks, last_weighted_module, owns_weights
from surefoot.parallel.world import ParallelError, World

STRATEGIES = ("data", "zero1", "zero2", "zero3")


def shards_weights(strategy: str, world: World) -> bool:
    """Whether the weights themselves are spread over the processes, so that all must take part in a forward pass."""
    return world.size > 1 and strategy in ("zero2", "zero3")


def wrap_model(
    model: nn.Module,
    strategy: str,
    world: World,
    *,
    compute_dtype: torch.dtype = torch.float32,
    keep_float32: Collection[nn.Module] = (),
    find_unused: bool = False,
) -> nn.Module:
    """The model as all processes train it together; with one process the model itself, on its device.

    `how` is data (whole copies), zero1 (the same; see `optimizer_for`), zero2 (gradients and optimizer sharded) or
    zero3 (weights too). Shards are gathered in `compute`, except in the modules to `keep_float32`, and gradients are
    summed in float32. `find_unused` is for models that leave some weights out of some forward passes.
    """
    if strategy not in STRATEGIES:
        raise ParallelError(f"parallel.how is one of {', '.join(STRATEGIES)}; got {strategy!r}")
    model = model.to(world.device)
    if world.size == 1:
        return model
    if not any(p.requires_grad for p in model.parameters()):
        raise ParallelError(f"no weight of {type(model).__name__} is to be trained: all have requires_grad=False")
    if shards_weights(strategy, world):
        return _sharded(model, strategy, world, compute_dtype, keep_float32)
    return DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=find_unused,
    )


def _sharded(
    model: nn.Module, how: str, world: World, compute: torch.dtype, keep_float32: Collection[nn.Module]
) -> nn.Module:
    """Blocks first, then what is left of the model; where it has no blocks, the model at once."""
    mesh = init_device_mesh(world.device.type, (world.size,))
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": None if how == "zero3" else False}
    half = compute if compute != torch.float32 else None
    for module in keep_float32 if half is not None else ():
        fully_shard(module, mp_policy=_kept(module, model, compute), **options)
    usual = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32)
    for block in find_blocks(model):
        fully_shard(block, mp_policy=usual, **options)
    fully_shard(model, mp_policy=usual, **options)
    return model


def _kept(module: nn.Module, model: nn.Module, compute: torch.dtype) -> MixedPrecisionPolicy:
    """Computes in float32 and hands on what the rest computes in; what the model ends with hands out float32."""
    if not owns_weights(module, model):
        name = next(name for name, each in model.named_modules() if each is module)
        raise ParallelError(
            f"precision.keep_float32: {name} has no weights of its own, or shares them with another part of the model, "
            "so it cannot be sharded apart. Leave it out, untie the weights, or take parallel.how=data."
        )
    ends = any(part is last_weighted_module(model) for part in module.modules())
    handed = None if ends else compute
    return MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, output_dtype=handed)
