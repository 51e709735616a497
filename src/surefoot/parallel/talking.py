"""What processes tell each other about a run: plain numbers and words, over the hosts' memory."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

from surefoot.parallel.world import World

T = TypeVar("T")
N = TypeVar("N", int, float)


def all_reduce_sum(world: World, number: N) -> N:
    """The sum of the numbers that the processes have; all call it at once, and no device is waited for."""
    if world.size == 1:
        return number
    whole = isinstance(number, int)
    told = torch.tensor([number], dtype=torch.int64 if whole else torch.float64)
    dist.all_reduce(told)
    return type(number)(told.item())


def broadcast(world: World, value: T) -> T:
    """What the first process has, on all of them; all call it at once."""
    told = [value]
    if world.size > 1:
        dist.broadcast_object_list(told, src=0, device=torch.device("cpu"))
    return told[0]
