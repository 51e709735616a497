"""Replicates or shards a model and its optimizer over the ranks (DDP, ZeRO-1, FSDP2 as ZeRO-2 and ZeRO-3).

With torch.compile: replicas (data, zero1) are compiled after wrapping, so that torch splits the graph where gradient
synchronisation begins; shards (zero2, zero3) are compiled block by block before wrapping, with `block.compile()`, so
that weights are gathered between the compiled parts.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from surefoot.parallel.process_group import ParallelError, World

STRATEGIES = ("data", "zero1", "zero2", "zero3")
SHARDABLE: tuple[type[Optimizer], ...] = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
)
"""Optimizers tested with zero1: the same weights as unsharded, and updates refused on all ranks."""
MIN_BATCH_NORM_SAMPLES = 4
"""Samples per device below which the statistics of batch norm are too noisy."""


def shards_weights(strategy: str, world: World) -> bool:
    """Whether the weights themselves are sharded, so that all ranks must take part in a forward pass."""
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
    """The model wrapped for training on all ranks; with one rank the model itself, on its device.

    `strategy` is data (full replicas), zero1 (the same; see `shard_optimizer`), zero2 (gradients and optimizer sharded)
    or zero3 (weights too). Shards are gathered in `compute_dtype`, except in the modules of `keep_float32`, and
    gradients are summed in float32. `find_unused` is for models that skip some weights in some forward passes.
    """
    if strategy not in STRATEGIES:
        raise ParallelError(f"parallel.strategy must be one of {', '.join(STRATEGIES)}; got {strategy!r}")
    model = model.to(world.device)
    if world.size == 1:
        return model
    if not any(p.requires_grad for p in model.parameters()):
        raise ParallelError(f"{type(model).__name__} has nothing to train: all its weights have requires_grad=False")
    if shards_weights(strategy, world):
        return _shard_model(model, strategy, world, compute_dtype, keep_float32)
    return DistributedDataParallel(
        model,
        device_ids=[world.device] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=find_unused,
    )


def _shard_model(
    model: nn.Module,
    strategy: str,
    world: World,
    compute_dtype: torch.dtype,
    keep_float32: Collection[nn.Module],
) -> nn.Module:
    """Shard each block, then the rest of the model; a model without blocks is sharded as a whole."""
    mesh = init_device_mesh(world.device.type, (world.size,))
    options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": None if strategy == "zero3" else False}
    low_precision = compute_dtype if compute_dtype != torch.float32 else None
    for module in keep_float32 if low_precision is not None else ():
        fully_shard(module, mp_policy=_float32_policy(module, model, compute_dtype), **options)
    policy = MixedPrecisionPolicy(param_dtype=low_precision, reduce_dtype=torch.float32)
    for block in find_blocks(model):
        fully_shard(block, mp_policy=policy, **options)
    fully_shard(model, mp_policy=policy, **options)
    return model


def _float32_policy(module: nn.Module, model: nn.Module, compute_dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Compute in float32 and return `compute_dtype`; the last module of the model returns float32."""
    if not owns_weights(module, model):
        name = next(name for name, child in model.named_modules() if child is module)
        raise ParallelError(
            f"precision.keep_float32: {name} has no weights of its own, or shares them with another part of the model, "
            "so it cannot be sharded separately. Leave it out, untie the weights, or use parallel.strategy=data."
        )
    is_last = any(child is last_weighted_module(model) for child in module.modules())
    output_dtype = None if is_last else compute_dtype
    return MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32, output_dtype=output_dtype)


def shard_optimizer(optimizer: Optimizer, strategy: str, world: World) -> Optimizer:
    """The optimizer to train with; for zero1 a new one over the same groups, with its state sharded over the ranks.

    Make the optimizer over the parameters of the wrapped model, pass it before its first step, and use the returned one
    from then on: for the schedule, the guard and the loop.
    """
    if strategy != "zero1" or world.size == 1:
        return optimizer
    optimizer_class = type(optimizer)
    if optimizer_class not in SHARDABLE:
        raise ParallelError(
            f"parallel.strategy=zero1 cannot shard {optimizer_class.__name__}: it is tested with "
            f"{', '.join(sorted(shardable.__name__ for shardable in SHARDABLE))}. Use one of these, or "
            "parallel.strategy=zero2 or zero3."
        )
    if any(state.get("step", 1) for state in optimizer.state.values()):
        raise ParallelError(f"{optimizer_class.__name__} has already stepped: shard it before its first step")
    from torch.distributed.optim import ZeroRedundancyOptimizer  # its import is heavy and emits warnings

    accepted = inspect.signature(optimizer_class).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    groups = [dict(group) for group in optimizer.param_groups]
    return cast(Optimizer, ZeroRedundancyOptimizer(groups, optimizer_class=optimizer_class, **defaults))


@contextlib.contextmanager
def grad_sync(model: nn.Module, sync: bool) -> Iterator[None]:
    """Run forward and backward of one micro-batch in here; gradients are synchronised only if `sync`.

    Pass `sync` for the micro-batch that an update follows, also when accumulation ends early: without it the ranks
    drift apart.
    """
    model = getattr(model, "_orig_mod", model)
    if sync:
        yield
    elif isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    elif isinstance(model, FSDPModule):
        _set_fsdp_sync(model, False)
        try:
            yield
        finally:
            _set_fsdp_sync(model, True)
    else:
        yield


def forward_failed(model: nn.Module) -> None:
    """A forward pass failed on this rank alone and is made again: the buffers that it received are not sent again."""
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, DistributedDataParallel):
        model.require_forward_param_sync = False


def _set_fsdp_sync(model: FSDPModule, on: bool) -> None:
    model.set_requires_gradient_sync(on)
    model.set_is_last_backward(on)


def sync_batch_norms(
    model: nn.Module, world: World, *, samples: int, accumulate: int = 1
) -> tuple[nn.Module, list[str]]:
    """The model, with SyncBatchNorm where `samples` per device are too few, and notes for the user.

    Call it before `wrap_model`.
    """
    count = sum(isinstance(m, _BatchNorm) and not isinstance(m, nn.SyncBatchNorm) for m in model.modules())
    notes: list[str] = []
    if not count:
        return model, notes
    too_few = samples < MIN_BATCH_NORM_SAMPLES
    if too_few and world.size > 1 and world.device.type == "cuda":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        notes.append(
            f"{count} batch norms use the samples of all {world.size} ranks, since {samples} per rank are too few"
        )
    elif too_few:
        reason = "SyncBatchNorm works on GPUs only" if world.size > 1 else "there is one process"
        notes.append(
            f"{count} batch norms see only {samples} samples at a time ({reason}): use batch.size of "
            f"{MIN_BATCH_NORM_SAMPLES} or more, or a norm that does not mix samples, such as group norm"
        )
    if accumulate > 1:
        notes.append(
            f"batch norm sees one micro-batch of {samples} at a time, not the {samples * accumulate} of an update: "
            "accumulation does not improve its statistics"
        )
    return model, notes


def unwrap_model(model: Any) -> nn.Module:
    """The model without the wrappers of torch.compile and DistributedDataParallel."""
    while True:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod
        else:
            return model


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules in the model's outermost `ModuleList`s whose weights no other module uses; may be empty."""
    model = unwrap_model(model)
    return [block for block in _module_list_items(model) if owns_weights(block, model)]


def owns_weights(block: nn.Module, model: nn.Module) -> bool:
    """Whether the block has weights and no other module of the model uses them."""
    in_block, in_model = _count_uses(block), _count_uses(model)
    return bool(in_block) and all(in_model[key] == count for key, count in in_block.items())


def last_weighted_module(model: nn.Module) -> nn.Module | None:
    """The last module with weights, in order of registration."""
    modules = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    return modules[-1] if modules else None


def _module_list_items(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, nn.ModuleList) and not isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield child
        else:
            yield from _module_list_items(child)


def _count_uses(model: nn.Module) -> Counter[int]:
    return Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
