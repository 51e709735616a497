"""The optimizer as all processes step it together: as it is, or with its state sharded over them (ZeRO-1)."""

from __future__ import annotations

import inspect
from typing import cast

import torch
from torch.optim import Optimizer

from surefoot.parallel.world import ParallelError, World

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
"""Those that are proven: the same weights as unsharded, and updates refused on all processes."""


def shard_optimizer(optimizer: Optimizer, strategy: str, world: World) -> Optimizer:
    """The optimizer to train with; for zero1 a new one over the same groups, whose state each process holds a share of.

    Make the optimizer over the parameters of the spread model, hand it in before its first step, and use what is
    returned for everything from there on: the schedule, the guard, the loop.
    """
    if strategy != "zero1" or world.size == 1:
        return optimizer
    kind = type(optimizer)
    if kind not in SHARDABLE:
        raise ParallelError(
            f"parallel.how=zero1 cannot shard {kind.__name__}: it is proven for "
            f"{', '.join(sorted(each.__name__ for each in SHARDABLE))}. Take one of these, or how=zero2 or zero3."
        )
    if any(state.get("step", 1) for state in optimizer.state.values()):
        raise ParallelError(f"{kind.__name__} has stepped before it was to be sharded: hand it in when it is new")
    from torch.distributed.optim import ZeroRedundancyOptimizer  # brings much along that warns when it is loaded

    accepted = inspect.signature(kind).parameters
    defaults = {name: value for name, value in optimizer.defaults.items() if name in accepted}
    groups = [dict(group) for group in optimizer.param_groups]
    return cast(Optimizer, ZeroRedundancyOptimizer(groups, optimizer_class=kind, **defaults))
