"""Batch norm that sees too few samples on each device sees those of all devices instead."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from surefoot.parallel.world import World

FEWEST = 4
"""Samples on each device below which batch norm's statistics are of little worth."""


def sync_batch_norms(
    model: nn.Module, world: World, *, samples: int, accumulate: int = 1
) -> tuple[nn.Module, list[str]]:
    """The model, its batch norms joined over the processes where `samples` on each are too few; and what to tell.

    Call it before `spread`.
    """
    count = sum(isinstance(m, _BatchNorm) and not isinstance(m, nn.SyncBatchNorm) for m in model.modules())
    told: list[str] = []
    if not count:
        return model, told
    few = samples < FEWEST
    if few and world.size > 1 and world.device.type == "cuda":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        told.append(f"{count} batch norms see the samples of all {world.size} processes, since {samples} are too few")
    elif few:
        why = "torch joins batch norms on GPUs only" if world.size > 1 else "there is one process"
        told.append(
            f"{count} batch norms see {samples} samples at a time, which is few ({why}): take batch.size of "
            f"{FEWEST} or more, or a norm that does not look at other samples, such as group norm"
        )
    if accumulate > 1:
        told.append(
            f"batch norm sees one micro-batch of {samples} at a time, not the {samples * accumulate} of an update: "
            "accumulation does not make its statistics better"
        )
    return model, told
